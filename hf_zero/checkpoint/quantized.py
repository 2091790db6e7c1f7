"""Quantized weights: which quantizer a checkpoint or model has, refused early where its weights cannot be sharded."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_zero.errors import UnsupportedError


# Its weights are frozen parameters, each of one dense tensor of bytes.
SHARDABLE = "bitsandbytes"


def quantizer_of(settings: Any) -> str | None:
    """The quantizer that a quantization config asks for, or `None` when the weights come out as ordinary tensors.

    Args:
        settings: a config of transformers' quantizers, its dict as in `config.json`, or `None`.
    """
    if settings is None:
        return None
    known = settings if isinstance(settings, Mapping) else vars(settings)
    if known.get("dequantize"):
        return None
    if known.get("load_in_4bit") or known.get("load_in_8bit"):
        return SHARDABLE
    method = known.get("quant_method")
    return str(getattr(method, "value", method))


def checkpoint_quantizer(name_or_folder: str | os.PathLike, where: Mapping[str, Any], settings: Any) -> str | None:
    """The quantizer of a checkpoint: that of the config given for it, else that of its own.

    Args:
        name_or_folder (`str` or `os.PathLike`): as for `from_pretrained`.
        where (`Mapping[str, Any]`): `from_pretrained`'s arguments that say where to look.
        settings: its `quantization_config`.

    Raises:
        `UnsupportedError`: its weights cannot be sharded.
    """
    if settings is None:
        settings = _config_of(name_or_folder, where).get("quantization_config")
    found = quantizer_of(settings)
    refuse_quantizer(str(name_or_folder), found)
    return found


def refuse_quantizer(subject: str, quantizer: str | None) -> None:
    """Refuses all quantizers but the one whose weights can be sharded.

    Raises:
        `UnsupportedError`: says what works instead.
    """
    if quantizer not in (None, SHARDABLE):
        raise UnsupportedError(
            f"{subject}: is quantized by {quantizer}, whose weights cannot be sharded; quantize it with {SHARDABLE} "
            "(BitsAndBytesConfig, 4 or 8 bits), or load it unquantized (dequantize=True, where its config has that)"
        )


def refuse_quantized_model(model: nn.Module) -> None:
    """Refuses quantizers as `refuse_quantizer` does, for a model that is loaded already, with adapters or without."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    refuse_quantizer(type(model).__name__, quantizer_of(settings))


def _config_of(name_or_folder: str | os.PathLike, where: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(name_or_folder, **where)[0]
    except OSError:  # the model's own loading says it better
        return {}
