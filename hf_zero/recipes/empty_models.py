"""Models and batches on the meta device, made of a config alone, and optimizers: what plans are made of."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from hf_zero.checkpoint import class_of
from hf_zero.config import choose
from hf_zero.errors import ConfigError
from hf_zero.planner.prediction import FUSED_ADAMW
from hf_zero.recipes.loading import one_line, quiet, resolve_config
from hf_zero.recipes.lora import AdapterArguments, QuantizationArguments, adapt, quantization_of
from hf_zero.trainer.arguments import SUPPORTED_OPTIMS


# The classes and arguments that Trainer has for these, as far as memory follows from them.
ADAMW = {"adamw_torch_fused": FUSED_ADAMW, "adamw_torch": partial(torch.optim.AdamW)}


def empty_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model on the meta device.

    Args:
        name (`str`): a hub id, `package:...`, a folder, or the path of a `config.json`.

    Raises:
        ConfigError: there is none, or it names no class that transformers has.
    """
    source = resolve_config(name, "model")
    with one_line(name, "building the model of its config"), quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(source)
        config.use_cache = False  # as `Trainer` has it
        return _class_of(name, config)._from_config(config, dtype=dtype).train()


def _class_of(name: str, config: PretrainedConfig) -> type[PreTrainedModel]:
    found = class_of(config)
    if found is None:
        raise ConfigError(
            f"model {name!r}: its config names no class of transformers in `architectures`; add one, such as "
            '"architectures": ["LlamaForCausalLM"]'
        )
    return found


def quantize(model: PreTrainedModel, settings: BitsAndBytesConfig) -> None:
    """Makes the layers of a model on the meta device those that `from_pretrained` gives for a quantization.

    Args:
        model (`PreTrainedModel`): in the dtype in which its weights would be read; changed in place.
        settings (`BitsAndBytesConfig`): what is done to which weights. bitsandbytes is installed.
    """
    from bitsandbytes.functional import name2qmap
    from transformers.quantizers.auto import AutoHfQuantizer

    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model, None)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            module.weight.data = module.weight.data.to(dtypes[f"{name}.weight"])
            # bitsandbytes keeps a table of codes, on the device of whatever it quantizes first
            with torch.device("cpu"), patch.dict(name2qmap):
                module.weight._quantize("meta")
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtypes[f"{name}.bias"])
    quantizer._process_model_after_weight_loading(model)
    model.hf_quantizer, model.is_quantized = quantizer, True


def quantized(
    model: PreTrainedModel, arguments: QuantizationArguments, compute_dtype: torch.dtype | None
) -> PreTrainedModel:
    """Returns a model as it would be read into 4 or 8 bits, if it would.

    Args:
        model (`PreTrainedModel`): on the meta device; changed in place.
        compute_dtype (`torch.dtype`, *optional*): in which is computed, if not in the dtype of the model.
    """
    settings = quantization_of(arguments, str(compute_dtype or model.dtype).removeprefix("torch."))
    if settings is not None:
        quantize(model, settings)
    return model


def adapted(
    model: PreTrainedModel,
    arguments: AdapterArguments,
    task_type: str | None = "CAUSAL_LM",
    new_modules: Sequence[str] = (),
) -> nn.Module:
    """Returns a model with its adapter, if it gets one, in the dtype that TRL gives adapters on quantized models."""
    made = adapt(model, arguments, task_type, new_modules)
    if made is not model and getattr(model, "is_quantized", False):
        for name, param in made.named_parameters():
            if param.requires_grad and "lora_magnitude_vector" not in name:
                param.data = param.data.to(torch.bfloat16)
    return made


def example_batch(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Tensor]:
    """Makes a batch on the meta device with labels, for sequences of full length without padding.

    Args:
        model (`PreTrainedModel`): its class says which labels it takes.
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


def optimizer_of(optim: str) -> partial:
    """Returns the class and arguments of the optimizer that `--optim` names.

    Raises:
        ConfigError: it does not run on shards, or its package is not installed.
    """
    choose("optim", optim, dict.fromkeys(sorted(SUPPORTED_OPTIMS)))
    if optim in ADAMW:
        return ADAMW[optim]
    from transformers import Trainer, TrainingArguments  # which takes seconds

    try:
        training = TrainingArguments(output_dir=str(Path.cwd()), optim=optim, use_cpu=True)
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(training)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim: {' '.join(str(error).split())}") from error
    return partial(kind, **kwargs)


def cast_batch(batch: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns a batch with its floating-point tensors in a dtype."""
    is_cast = {key: isinstance(value, Tensor) and value.is_floating_point() for key, value in batch.items()}
    return {key: value.to(dtype) if is_cast[key] else value for key, value in batch.items()}
