"""The shape of a batch, for models that are not trained yet: what a collator would hand to one rank."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_zero.errors import ConfigError


def example_batch(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Tensor]:
    """Makes a batch without data for a model, with labels: sequences of full length, none padded.

    Args:
        model (`PreTrainedModel`): its class says which labels it takes.
        batch_size (`int`): rows.
        length (`int`): tokens of a row; for an encoder and decoder, of each.

    Raises:
        ConfigError: for a model that takes neither tokens nor images.
    """
    kind = type(model).__name__
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": _empty(batch_size, *_image_shape(model), dtype=model.dtype)}
    elif model.main_input_name == "input_ids":
        inputs = {name: _empty(batch_size, length) for name in ("input_ids", "attention_mask")}
    else:
        raise ConfigError(f"model: {kind} takes {model.main_input_name}, and only tokens and images are planned")
    if "For" not in kind and not kind.endswith("HeadModel"):
        return inputs  # without a head there is no loss
    by_row = any(word in kind for word in ("SequenceClassification", "ImageClassification"))
    return {**inputs, "labels": _empty(batch_size) if by_row else _empty(batch_size, length)}


def _image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    size = getattr(model.config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(model.config, "num_channels", 3), height, width


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
