"""The smallest configuration of any architecture: transformers' default one, with every size made small by its name.

What names do not say stands in `OVERRIDES`, by the `model_type` of the (possibly nested) configuration.
"""

import re
from functools import cache
from typing import Any

from tests.architectures.overrides import LATE, OVERRIDES
from tests.architectures.rules import HEAD_DIM, HIDDEN, IMAGE, LAYERS, MISSING, VOCAB, small_value


NUM_LABELS = 3
DERIVED = {"stage_names", "per_layer_config", "transformers_version", "architectures", "_name_or_path", "dtype"}
LABELS = ("id2label", "label2id")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
ID_NAME = re.compile(".*(_token_index|_id|_ids|image_token)s?")


def tiny_config(model_type: str):
    """The small configuration of this type."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = shrink(_defaults(model_type), Ids())
    if "id2label" in fields:
        fields["id2label"] = {index: f"LABEL_{index}" for index in range(NUM_LABELS)}
        fields["label2id"] = {label: index for index, label in fields["id2label"].items()}
    for name, part_class in config_class.sub_configs.items():  # a tower that is not there by default
        if fields.get(name, 0) is None and getattr(part_class, "model_type", ""):
            fields[name] = shrink(_defaults(part_class.model_type), Ids())
    config = config_class.from_dict(fields)
    for part in _parts(config):
        for name in ("pad_token_id", "decoder_start_token_id"):
            has_text = hasattr(part, "vocab_size") or part.is_encoder_decoder
            if has_text and getattr(part, name, None) is None:
                setattr(part, name, 0)
    for name, value in LATE.get(model_type, {}).items():
        setattr(config, name, value)
    return config


@cache
def _defaults(model_type: str) -> dict:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]().to_dict()


def _parts(config):
    """A configuration and those nested in it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if hasattr(getattr(config, name, None), "sub_configs"):
            yield from _parts(getattr(config, name))


class Ids:
    """Special tokens keep being different from one another: those beyond the vocabulary move to its end, downward."""

    def __init__(self):
        self.moved: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.of(item) for item in value]
        if not isinstance(value, int) or isinstance(value, bool) or value < VOCAB - 40:
            return value
        return self.moved.setdefault(value, VOCAB - 1 - len(self.moved))


def shrink(fields: dict, ids: Ids) -> dict:
    """The same fields, small; nested configurations too.

    Args:
        fields (`dict`): of a configuration, or a dict in one.
        ids (`Ids`): where special tokens have gone.
    """
    special = OVERRIDES.get(fields.get("model_type"), {})
    fields = {name: value for name, value in fields.items() if name not in DERIVED and name not in special}
    count_name = next((name for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    count = fields.get(count_name) if "depths" not in fields else None
    kept = _kept_layers(fields, count) if count else []
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name not in LABELS:
            small[name] = shrink(value, ids)
        elif not isinstance(name, str) or name in LABELS:
            small[name] = value
        elif ID_NAME.fullmatch(name):
            small[name] = ids.of(value)
        elif count and isinstance(value, (list, tuple)) and len(value) == count:
            small[name] = [small_value(name, value[index]) for index in kept]
        elif count and name == count_name:
            small[name] = len(kept)
        elif not count or name not in ("out_indices", "out_features"):  # these follow from the number of layers
            small[name] = small_value(name, value)
    return {**small, **_consistent(small, fields), **special}


def _consistent(small: dict, fields: dict) -> dict:
    """Fields that must agree with others, or that are missing."""
    more: dict[str, Any] = {name: value for name, value in MISSING.items() if small.get(name, 0) is None}
    for side in ("", "encoder_", "decoder_"):
        queries, keys = f"{side}num_attention_heads", f"{side}num_key_value_heads"
        if keys in small and fields.get(keys) in (None, fields.get(queries)):
            more[keys] = small.get(queries)
    if "depths" in small and isinstance(small.get("image_size"), int):
        more["image_size"] = 2 * IMAGE
    if "depths" in small and isinstance(small.get("embed_dim"), int):
        more["embed_dim"] = HIDDEN // 4  # doubled from stage to stage
    if "mrope_section" in small:
        half = int(HEAD_DIM // 2 * fields.get("partial_rotary_factor", 1.0))
        more["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    if "use_cache" in small:
        more["use_cache"] = False  # as Trainer has it
    return more


def _kept_layers(fields: dict, count: int) -> list[int]:
    """Which layers remain: the first ones, but so that there is one of each kind that a list of layers names."""
    kept: list[int] = []
    for value in fields.values():
        if isinstance(value, (list, tuple)) and len(value) == count:
            kinds = [str(item) for item in value]
            firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
            if len(firsts) <= LAYERS + 1:
                kept += [index for index in firsts if index not in kept]
    spare = [index for index in range(count) if index not in kept]
    return sorted(kept + spare[: max(0, min(LAYERS, count) - len(kept))])
