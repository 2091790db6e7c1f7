"""A tiny model of any type whose checkpoints transformers converts, out of its config class alone."""

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)


SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "ssm_state_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_topk", "patch_size", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "n_groups"), 1),
    **dict.fromkeys(("image_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "deepstack_visual_indexes": [0],
    "layer_types": None,
    "mlp_layer_types": None,
}


def known(*model_types: str) -> list[str]:
    """Those that the installed transformers has: some are newer than the oldest version that is supported."""
    return [model_type for model_type in model_types if model_type in CONFIG_MAPPING]


def tiny(model_type: str) -> PreTrainedModel:
    """The same model at every call: what the class offers for language, else its bare model."""
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[model_type]
    defaults = config_class()
    parts = {name: getattr(defaults, name, None) for name in config_class.sub_configs}
    small = {name: _sizes(part) for name, part in parts.items() if part is not None}
    try:
        config = config_class(**_sizes(defaults), **small)
    except Exception:  # some classes want their lists of layer types as they are
        sizes = {name: size for name, size in _sizes(defaults).items() if not name.endswith("layer_types")}
        config = config_class(**sizes, **small)
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING)
    found = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    model = (found[0] if isinstance(found, (tuple, list)) else found)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # equal values, as in norms, would hide a wrong order
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))))
    return model


def _sizes(config) -> dict:
    return {
        name: size
        for name, size in SIZES.items()
        if hasattr(config, name)
        and (name == "layer_types" or isinstance(getattr(config, name), (int, list, type(None))))
    }
