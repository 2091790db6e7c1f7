"""Compares the model of a run with that of its checkpoints: to go on, it has to be the same."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from hf_zero.checkpoint.folders import read_json
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.language_models import config_of, named_model
from hf_zero.recipes.loading import ADAPTER_CONFIG_NAME, load_config
from hf_zero.recipes.settings import NEVER, Settings


# Numbers of a config that say no size: a tokenizer or a task may set them.
NO_SIZES = ("_id", "_ids", "_index", "label2id")
# What training, saving and reading set.
SET_BY_TRAINING = ("_name_or_path", "architectures", "dtype", "id2label", "transformers_version", "use_cache")

Change = tuple[str, Any, Any]  # a key, its value now and its value before


def check_same_model(settings: Settings, checkpoints: Iterable[Path]) -> None:
    """Refuses to go on from the checkpoints of another model, of which the first with a config is compared. Configs
    that cannot be read are left to loading."""
    for checkpoint in checkpoints:
        found = _difference(settings.arguments, checkpoint)
        if found is not None:
            raise ConfigError(
                f"output_dir {settings.training['output_dir']!r}: {checkpoint} is of another model ({found}); give "
                f"another output_dir, or --resume {NEVER}, which moves it aside"
            )
        if any((checkpoint / name).is_file() for name in ("config.json", ADAPTER_CONFIG_NAME)):
            return


def first_change(now: dict[str, Any], before: dict[str, Any], keys: Iterable[str]) -> Change | None:
    """Returns the first of the keys whose value has changed, of those that there were before."""
    return next(((key, now[key], before[key]) for key in keys if key in before and now[key] != before[key]), None)


def in_words(changed: Change) -> str:
    """Returns a change in words."""
    return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"


def _difference(arguments: Any, checkpoint: Path) -> str | None:
    if (checkpoint / ADAPTER_CONFIG_NAME).is_file():
        return _of_adapter(arguments, checkpoint)
    before = _config(partial(load_config, str(checkpoint))) if (checkpoint / "config.json").is_file() else None
    if before is not None and arguments.use_peft:
        return "it is no adapter, and use_peft trains one"
    now = before and _config(partial(config_of, arguments))
    if not before or not now:
        return None
    text = now.get_text_config()
    if before.model_type != now.model_type and before.model_type == text.model_type:
        now = text  # of a model of texts and images, AutoModelForCausalLM makes the part for texts
    is_new = named_model(arguments)[0] == "config_name"
    kept_now, kept_before = (
        {"model_type": config.model_type, **_kept(config, whole=is_new)} for config in (now, before)
    )
    if is_new:  # a key that the checkpoint's config has not
        kept_before = {**dict.fromkeys(kept_now), **kept_before}
    changed = first_change(kept_now, kept_before, kept_now)
    return changed and in_words(changed)


def _of_adapter(arguments: Any, checkpoint: Path) -> str | None:
    if not arguments.use_peft:
        return "it is an adapter, and use_peft is not set"
    try:
        rank = read_json(checkpoint / ADAPTER_CONFIG_NAME).get("r")
    except (CheckpointError, OSError):
        return None
    return None if rank == arguments.lora_r else in_words(("lora_r", arguments.lora_r, rank))


def _config(load: Callable[[], PretrainedConfig]) -> PretrainedConfig | None:
    try:
        return load()
    except ConfigError:
        return None


def _kept(config: PretrainedConfig, prefix: str = "", *, whole: bool) -> dict[str, Any]:
    """Returns what of a config has to stay, with that of the model's parts: the numbers that determine shapes, or
    `whole`, where a file of the user's is the one source of it, all but what training sets."""
    left_out = {*SET_BY_TRAINING, *config.sub_configs}
    kept = {
        prefix + key: value
        for key, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not key.endswith(NO_SIZES) and (key not in left_out if whole else _is_size(value))
    }
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            kept |= _kept(part, f"{prefix}{name}.", whole=whole)
    return kept


def _is_size(value: Any) -> bool:
    return type(value) is int or isinstance(value, list) and all(type(each) is int for each in value)
