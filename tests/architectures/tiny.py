"""The smallest configuration of any architecture: transformers' default one, with every size made small by its name.

Names of fields mean the same in nearly all architectures. What they do not say stands in `OVERRIDES`, by the
`model_type` of the (possibly nested) configuration that has the field.
"""

import re
from functools import cache
from typing import Any

from tests.architectures.overrides import CLASSES, LATE, OVERRIDES


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
LAYERS = 3  # one more than there are slots, so that units are gathered again in backward
VOCAB, POSITIONS = 160, 128
IMAGE, PATCH = 32, 8
NUM_LABELS = 3

# The first rule whose pattern is found in a whole name gives the value; a number is an upper bound, a function maps
# the default to the tiny value.
RULES: list[tuple[str, Any]] = [
    (
        r".*(dropout|pdrop|drop_rate|droppath|drop_path|layerdrop|drop_prob|drop_connect|jitter|drop_mlp|drop_conv|label_noise).*",
        0.0,
    ),
    (r"mask_(time|feature)_prob", 0),
    (r"initializer_range|init_std", lambda v: max(v, 0.02)),
    (r".*(router|aux|z)_loss.*coef.*|.*type_vocab_size|num_channels|audio_channels|channels|.*_coef(ficient)?", None),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|mamba_nheads", 8),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 16),
    (
        r".*(key_value|kv)(_attention)?_heads|num_key_value_groups|multi_query_group_num|num_kv|swa_num_key_value_heads",
        KV_HEADS,
    ),
    (
        r".*(attention_|_)heads|num_heads|n_heads?|heads|.*_num_heads|num_heads_.*|num_attention_heads_per_stage",
        lambda v: max(w for w in (1, 2, HEADS) if w <= v),
    ),
    (
        r"(global_|swa_|local_|v_|cross_|resampler_|index_|linear_(key|value)_|linear_|attention_)?head_dim|d_kv|kv_channels|d_head|dim_head",
        HEAD_DIM,
    ),
    (r"qk_head_dim|index_head_dim", 2 * HEAD_DIM),
    (r".*_head_dim|attention_head_size", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (
        r"depths|num_block_repeats|layer_repeats|stage_num_blocks|stage_numb_of_layers|blocks_per_stage|block_repeats",
        2,
    ),
    (r".*vocab(_size|ulary_size)?(_per_layer_input)?", VOCAB),
    (
        r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_sequence_length|model_max_length|max_position)",
        POSITIONS,
    ),
    (r"max_source_positions", 32),
    (r"upsample_groups", HIDDEN),
    (r"max_(2d_position_embeddings|target_positions)|seq_length", POSITIONS),
    (
        r"num_(experts|local_experts|routed_experts)|n_routed_experts|(moe_)?num_experts|expert_capacity|num_moe_experts|n_experts",
        4,
    ),
    (r".*(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts)", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|first_k_dense_replace|num_dense_layers", 1),
    (r"(q|kv)_lora_rank|o_lora_rank|.*_rank|.*lora_dim", 16),
    (
        r"(shared_)?image_size|img_size|pretrain_image_size|max_image_size|crop_size|train_size|input_size|resolution",
        IMAGE,
    ),
    (r"(vision_)?patch_size|(max_)?patch_length", PATCH),
    (r"(num_)?(mel_bins|n_mels)|n_mel_bins|feature_size|input_feat_per_channel", 32),
    (r"sliding_window(_size)?|attention_chunk_size|attention_window(_size)?|local_attention(_window_len)?", 16),
    (r"window_size|window", 2),
    (
        r"num_queries|num_object_queries|num_query_tokens|.*num_latents|num_detection_tokens|.*n_latents|two_stage_num_proposals",
        8,
    ),
    (r"num_denoising", 0),
    (r".*(chunk_size|block_size)(?<!feed_forward)", lambda v: min(v, 16)),
    (r"(.*_)?(mamba_)?(d_)?state(_size)?|ssm_state_size|mamba_d_state|state_size", 8),
    (r".*num_frames|frames_per_clip|num_timesteps", 4),
    (r"train_num_points|num_points", 64),
    (
        r"classifier_proj_size|xvector_output_dim|codebook_dim|codevector_dim|proj_codevector_dim|num_codevectors_per_group|codebook_size",
        16,
    ),
    (r"num_negatives", 4),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 4),
    (
        r".*(intermediate_size|ffn_dim|feedforward_dim|dim_feedforward|feed_forward_size|mlp_dim|d_ff|dim_ff|dff|n_inner|ffn_hidden_size|d_inner|linear_units|feed_forward_proj|ffn_size)(_mlp)?",
        INNER,
    ),
    (
        r"num_feat_extract_layers|num_nextn_predict_layers|num_stages|num_encoder_blocks|num_feature_levels|max_window_layers",
        None,
    ),
    (
        r".*(num_|n_|encoder_|decoder_|^)(hidden_)?(num_)?(transformer_)?layers?|.*_layers|layers|depth|num_blocks|resampler_depth",
        LAYERS,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|emb_dim|embedding_size|embedding_dim|projection_dim|project_dim|proj_dim|output_dim|dim|width|d_latents|lru_width|out_hidden_size|hidden_dimension|channels|proj_size|dim_model|query_dim|conv_dim|input_dim|feature_dim|out_dim|in_dim|projection_size|pooler_output_size|attn_hidden|bottleneck_features|mlp_hidden|descriptor_dim|hidden_sizes|embed_dims|embed_dim_per_stage|backbone_channel_list|.*channels|filters|.*_planes)(_global)?",
        HIDDEN,
    ),
    (r"groups_width", HEAD_DIM),
    (r"bbox_dim|coordinate_size|shape_size", None),
]
_COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]

# What some default configurations leave out although the model cannot do without.
MISSING = {
    "vocab_size": VOCAB,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "head_dim": HEAD_DIM,
    "image_token_id": VOCAB - 31,
    "image_token_index": VOCAB - 31,
    "audio_token_id": VOCAB - 32,
}
DERIVED = {"stage_names", "per_layer_config", "transformers_version", "architectures", "_name_or_path", "dtype"}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
ID_NAME = re.compile(
    r".*(_token_id|_token_index|_token_ids|_bos_id|_eos_id|_start_id|_end_id|_pad_id|image_token|_id)s?"
)


def tiny_config(model_type: str, **changes):
    """The small configuration of this type.

    Args:
        changes: fields set at the end, on the outermost configuration.
    """
    from transformers import CONFIG_MAPPING

    make = CLASSES.get(model_type)
    if make is not None:
        return make(tiny_config, **changes)
    config_class = CONFIG_MAPPING[model_type]
    fields = shrink(_defaults(model_type), Ids())
    if "id2label" in fields:
        fields["id2label"] = {index: f"LABEL_{index}" for index in range(NUM_LABELS)}
        fields["label2id"] = {label: index for index, label in fields["id2label"].items()}
    for name, sub_class in config_class.sub_configs.items():  # a tower that is not there by default
        if fields.get(name, 0) is None and getattr(sub_class, "model_type", ""):
            fields[name] = shrink(_defaults(sub_class.model_type), Ids())
    fields.update(changes)
    config = config_class.from_dict(fields)
    for part in _parts(config):
        for name in ("pad_token_id", "decoder_start_token_id"):
            has_text = hasattr(part, "vocab_size") or part.is_encoder_decoder
            if has_text and getattr(part, name, None) is None:
                setattr(part, name, 0)
    for name, value in LATE.get(model_type, {}).items():
        setattr(config, name, value)
    return config


def _parts(config):
    """A configuration and those nested in it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if hasattr(getattr(config, name, None), "sub_configs"):
            yield from _parts(getattr(config, name))


@cache
def _defaults(model_type: str) -> dict:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**OVERRIDES.get("init:" + model_type, {})).to_dict()


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
    """The same fields, small; nested configurations too."""
    fields = {name: value for name, value in fields.items() if name not in DERIVED}
    special = OVERRIDES.get(fields.get("model_type"), {})
    count_name = next((name for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    count = fields.get(count_name) if count_name and "depths" not in fields else None
    kept = _kept_layers(fields, count)
    small = {}
    for name, value in fields.items():
        if not isinstance(name, str):
            small[name] = value
            continue
        if name in special:
            continue
        if isinstance(value, dict):
            small[name] = value if name in ("id2label", "label2id") else shrink(value, ids)
        elif name == "mrope_section":
            half = int(HEAD_DIM // 2 * fields.get("partial_rotary_factor", 1.0))
            small[name] = [half - 2 * (half // 4), half // 4, half // 4]
        elif ID_NAME.fullmatch(name):
            small[name] = ids.of(value)
        elif isinstance(value, (list, tuple)) and count and len(value) == count:
            small[name] = [small_value(name, value[index]) for index in kept]
        elif name in ("out_indices", "out_features") and count:
            continue
        elif count and name == count_name:
            small[name] = len(kept)
        else:
            small[name] = small_value(name, value)
    for side in ("", "encoder_", "decoder_"):
        queries, keys = f"{side}num_attention_heads", f"{side}num_key_value_heads"
        if keys in small and fields.get(keys) in (None, fields.get(queries)):
            small[keys] = small.get(queries)
    if "depths" in small and isinstance(small.get("image_size"), int):
        small["image_size"] = 2 * IMAGE
    if "depths" in small and isinstance(small.get("embed_dim"), int):
        small["embed_dim"] = HIDDEN // 4  # doubled from stage to stage
    if "use_cache" in small:
        small["use_cache"] = False  # as Trainer has it
    small |= {name: value for name, value in MISSING.items() if name in small and small[name] is None}
    return {**small, **special}


def _kept_layers(fields: dict, count: int | None) -> list[int]:
    """Which layers remain: the first ones, but so that there is one of each kind that a list of layers names."""
    if not count:
        return []
    kept: list[int] = []
    for value in fields.values():
        if isinstance(value, (list, tuple)) and len(value) == count:
            kinds = [str(item) for item in value]
            firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
            if len(firsts) <= LAYERS + 1:
                kept += [index for index in firsts if index not in kept]
    spare = [index for index in range(count) if index not in kept]
    kept += spare[: max(0, min(LAYERS, count) - len(kept))]
    return sorted(kept)


def small_value(name: str, value: Any) -> Any:
    """One field made small by the rule for its name."""
    if value is None or isinstance(value, (str, bool)):
        return value
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(name)), None)
    if isinstance(value, (list, tuple)):
        return [small_item(name, rule, item) for item in value]
    return small_item(name, rule, value)


def small_item(name: str, rule: Any, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [small_item(name, rule, item) for item in value]
    if rule is None or value is None or isinstance(value, (str, bool, dict)):
        return value
    if callable(rule):
        return rule(value)
    return type(value)(min(value, rule)) if value >= 0 else value
