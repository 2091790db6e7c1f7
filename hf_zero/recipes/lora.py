"""The trained part of a model: keys for LoRA adapters, quantized bases and frozen parameters, under the names of
TRL."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils import is_bitsandbytes_available, is_peft_available

from hf_zero.checkpoint.adapters import read_for_adapter
from hf_zero.engine import placeholders
from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import option, refuse_less


if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
NUMBERS = re.compile(r"\[(\d+-\d{2,}|\d{2,}-)")  # meant as numbers of layers, but read as one letter


@dataclass
class TrainedArguments:
    """Keys of the trained part: parameters that are frozen, or an adapter that is trained instead of the model."""

    freeze: list[str] | None = option(
        None,
        "Name patterns of parameters or modules that are not trained, such as model.embed_tokens or "
        "model.layers.[0-3].",
    )
    unfreeze: list[str] | None = option(None, "Exceptions to freeze.")
    use_peft: bool = option(False, "Train a LoRA adapter instead of the model.")
    lora_r: int = option(16, "LoRA rank.")
    lora_alpha: int = option(32, "LoRA scaling: the update is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = option(0.05, "Dropout of the adapter's inputs.")
    lora_target_modules: list[str] | None = option(None, f"Modules to adapt, by name. Default: {ALL_LINEAR}.")
    lora_target_parameters: list[str] | None = option(None, "Parameters to adapt, by name, such as those of experts.")
    lora_modules_to_save: list[str] | None = option(None, "Modules to train in full and save with the adapter.")
    use_rslora: bool = option(False, "Scale the update by lora_alpha / sqrt(lora_r) (arXiv 2312.03732).")
    use_dora: bool = option(False, "Also train the magnitudes of the weights (DoRA, arXiv 2402.09353).")


@dataclass
class QuantizationArguments:
    """Keys of the quantization of an adapter's base."""

    load_in_4bit: bool = option(False, "Load the base in 4 bits with bitsandbytes (QLoRA, arXiv 2305.14314).")
    load_in_8bit: bool = option(False, "Load the base in 8 bits with bitsandbytes.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "nf4 or fp4.")
    use_bnb_nested_quant: bool = option(False, "Quantize the scales of the 4-bit values too.")
    bnb_4bit_quant_storage: str | None = option(
        None, "Storage dtype of the 4-bit values, such as bfloat16. Default: uint8."
    )


def check_trained(arguments: TrainedArguments) -> None:
    """Refuses keys of an adapter and of frozen parameters that cannot work, or contradict each other."""
    for key in ("freeze", "unfreeze"):
        for pattern in filter(NUMBERS.search, getattr(arguments, key) or ()):
            raise ConfigError(
                f"{key} {pattern!r}: [ ] stands for one letter, never for a number of two digits; write two patterns, "
                "such as model.layers.[0-9] model.layers.1[0-5]"
            )
        if getattr(arguments, key) and arguments.use_peft:
            raise ConfigError(
                f"{key}: with use_peft the model is frozen, but for lora_modules_to_save; leave one of them out"
            )
    if arguments.unfreeze and not arguments.freeze:
        raise ConfigError("unfreeze: nothing is frozen that could be trained; give --freeze too, such as --freeze '*'")
    if not arguments.use_peft:
        for each in fields(TrainedArguments):
            if not each.name.endswith("freeze") and getattr(arguments, each.name) != each.default:
                raise ConfigError(
                    f"{each.name}: describes an adapter, and none is trained; add --use_peft, or leave it out"
                )
        return
    if not is_peft_available():
        raise ConfigError("use_peft: PEFT is not installed; pip install 'hf-zero[peft]'")
    refuse_less(arguments, lora_r=1, lora_alpha=1)
    if not 0 <= arguments.lora_dropout < 1:
        raise ConfigError(f"lora_dropout {arguments.lora_dropout}: expected 0 or more, and less than 1")


def check_quantization(arguments: QuantizationArguments) -> None:
    """Refuses settings that cannot work. Quantized weights are not trained, but an adapter of them is."""
    is_quantized = arguments.load_in_4bit or arguments.load_in_8bit
    if is_quantized and not getattr(arguments, "use_peft", True):  # nothing is trained where the key does not exist
        raise ConfigError("load_in_4bit, load_in_8bit: quantized weights are not trained; add --use_peft")
    if arguments.load_in_4bit and arguments.load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit are both given; give one of them")
    if not arguments.load_in_4bit:
        for each in fields(QuantizationArguments):
            if each.name not in ("load_in_4bit", "load_in_8bit") and getattr(arguments, each.name) != each.default:
                raise ConfigError(f"{each.name}: describes a model in 4 bits; add --load_in_4bit, or leave it out")
    if is_quantized and not is_bitsandbytes_available():
        raise ConfigError("load_in_4bit, load_in_8bit: bitsandbytes is not installed; pip install bitsandbytes")


def quantization_of(arguments: QuantizationArguments, dtype: str) -> "BitsAndBytesConfig | None":
    """Returns the quantization config of the adapter's base, which computes in `dtype`, if it is quantized."""
    if arguments.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not arguments.load_in_4bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if dtype == "auto" else dtype,
        bnb_4bit_quant_type=arguments.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=arguments.use_bnb_nested_quant,
        bnb_4bit_quant_storage=arguments.bnb_4bit_quant_storage,
    )


def lora_config(
    arguments: TrainedArguments, task_type: str | None = "CAUSAL_LM", new_modules: Sequence[str] = ()
) -> "LoraConfig | None":
    """Returns PEFT's config of the adapter; `None` without `use_peft`. `new_modules` are in no checkpoint and are
    trained in full."""
    if not arguments.use_peft:
        return None
    from peft import LoraConfig

    targets = _targets(arguments)
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        # PEFT takes a list as names, and a text as a regular expression or "all-linear"
        target_modules=targets[0] if len(targets) == 1 and re.search(r"[^\w.]", targets[0]) else targets,
        task_type=task_type,
        modules_to_save=[*new_modules, *(arguments.lora_modules_to_save or ())] or None,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
        target_parameters=arguments.lora_target_parameters,
    )


def head_of(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules with parameters outside of the base model."""
    beside = [(name, child) for name, child in model.named_children() if name != model.base_model_prefix]
    return [name for name, child in beside if any(True for _ in child.parameters())]


def adapt(
    model: PreTrainedModel,
    arguments: TrainedArguments,
    task_type: str | None = "CAUSAL_LM",
    new_modules: Sequence[str] = (),
) -> nn.Module:
    """Adds an adapter to a model, whose weights may still be in files, if `use_peft` is set. Returns the `PeftModel`,
    or the model itself."""
    config = lora_config(arguments, task_type, new_modules)
    if config is None:
        return model
    from peft import get_peft_model

    read_for_adapter(model, config)
    try:
        with placeholders(model):
            return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"lora_target_modules {_targets(arguments)}: {reason}") from error


def _targets(arguments: TrainedArguments) -> list[str]:
    """Returns the modules that get an adapter, none if only parameters are named."""
    return arguments.lora_target_modules or ([] if arguments.lora_target_parameters else [ALL_LINEAR])


def freeze_parameters(model: nn.Module, arguments: TrainedArguments) -> list[str]:
    """Freezes the parameters whose names, or whose modules' names, match a pattern; each name of a tied parameter
    counts. Returns a line about it. Raises [`ConfigError`] if a pattern matches nothing, or nothing is left to
    train."""
    if not arguments.freeze:
        return []
    params = dict(model.named_parameters(remove_duplicate=False))
    frozen = _matching(params, "freeze", arguments.freeze)
    kept = _matching({name: params[name] for name in frozen}, "unfreeze", arguments.unfreeze or [])
    ids = {id(params[name]) for name in frozen} - {id(params[name]) for name in kept}
    for param in params.values():
        if id(param) in ids:
            param.requires_grad_(False)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if not trained:
        raise ConfigError(f"freeze {arguments.freeze}: nothing is left to train; freeze less, or unfreeze some")
    total = sum(param.numel() for param in model.parameters())
    return [f"trained: {trained:,} of {total:,} parameters"]


def _matching(names: dict[str, nn.Parameter], key: str, patterns: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matches:
            some = f"{', '.join(list(names)[:3])} and so on"
            raise ConfigError(f"{key} {pattern!r}: matches none of {len(names)} parameters; {some}")
        found |= matches
    return found
