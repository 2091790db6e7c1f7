"""The sizes of models that everyone knows, as their configs on the hub have them: what plans are made of in tests."""

from copy import deepcopy
from functools import cache

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)


_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
CONFIGS = {
    "HuggingFaceTB/SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Qwen/Qwen3-32B": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "meta-llama/Llama-3.1-70B": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 151936,
    },
    "answerdotai/ModernBERT-base": {
        "model_type": "modernbert",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "vocab_size": 50368,
    },
    "google/vit-base-patch16-224-in21k": {
        "model_type": "vit",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "llava-hf/llava-1.5-7b-hf": {
        "model_type": "llava",
        "image_token_id": 32000,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
    },
}
CLASSES = {
    "modernbert": AutoModelForSequenceClassification,
    "vit": AutoModelForImageClassification,
    "llava": AutoModelForImageTextToText,
}


def config_of(name: str) -> PretrainedConfig:
    """The config of the model, of which many values are transformers' own."""
    settings = deepcopy(CONFIGS[name])
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@cache
def empty_model(name: str) -> nn.Module:
    """The model on the meta device, in fp32 and in training mode."""
    kind = CONFIGS[name]["model_type"]
    with torch.device("meta"):
        config = config_of(name)
        return CLASSES.get(kind, AutoModelForCausalLM).from_config(config, dtype=torch.float32).train()
