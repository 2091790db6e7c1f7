"""A tiny model of any type whose checkpoints transformers converts."""

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from tests.architectures.tiny import tiny_config


def known(*model_types: str) -> list[str]:
    """Those that the installed transformers has: some are newer than the oldest version that is supported."""
    return [model_type for model_type in model_types if model_type in CONFIG_MAPPING]


def tiny(model_type: str) -> PreTrainedModel:
    """The same model at every call: what the class offers for language, else its bare model."""
    config = tiny_config(model_type)
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING)
    found = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    torch.manual_seed(0)
    model = (found[0] if isinstance(found, (tuple, list)) else found)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # equal values, as in norms, would hide a wrong order
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))))
    return model
