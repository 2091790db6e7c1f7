"""Keys for LoRA adapters, also on a base in 4 or 8 bits, under the names of TRL, and making an adapter."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils import is_bitsandbytes_available, is_peft_available

from hf_zero.checkpoint.adapters import read_for_adapter
from hf_zero.config import choose
from hf_zero.engine import placeholders
from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import option, refuse_less


if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"


@dataclass
class AdapterArguments:
    """Keys for the adapter that is trained in place of the model."""

    use_peft: bool = option(False, "Train a LoRA adapter; the model itself stays as it is.")
    lora_r: int = option(16, "The rank of the adapter.")
    lora_alpha: int = option(32, "The adapter counts lora_alpha / lora_r.")
    lora_dropout: float = option(0.05, "Dropout of what the adapter reads.")
    lora_target_modules: list[str] | None = option(
        None, f"Names of the modules that get an adapter; by default {ALL_LINEAR}."
    )
    lora_target_parameters: list[str] | None = option(
        None, "Names of parameters that get one, such as those of experts."
    )
    lora_modules_to_save: list[str] | None = option(
        None, "Modules that are trained whole, and saved with the adapter."
    )
    use_rslora: bool = option(False, "The adapter counts lora_alpha / sqrt(lora_r) (arXiv 2312.03732).")
    use_dora: bool = option(False, "Magnitudes of the weights are trained beside (DoRA, arXiv 2402.09353).")


@dataclass
class QuantizationArguments:
    """Whether the base of the adapter is quantized, and how."""

    load_in_4bit: bool = option(False, "The model is read into 4 bits by bitsandbytes (QLoRA, arXiv 2305.14314).")
    load_in_8bit: bool = option(False, "The model is read into 8 bits by bitsandbytes.")
    bnb_4bit_quant_type: str = option("nf4", "nf4 or fp4.")
    use_bnb_nested_quant: bool = option(False, "The scales of the 4 bits are quantized too.")
    bnb_4bit_quant_storage: str | None = option(
        None, "The dtype in which the 4 bits are kept, such as bfloat16; by default uint8."
    )


def check_adapter(arguments: AdapterArguments) -> None:
    """Refuses settings of an adapter that cannot work."""
    if not arguments.use_peft:
        for described in fields(AdapterArguments):
            if getattr(arguments, described.name) != described.default:
                raise ConfigError(
                    f"{described.name}: describes an adapter, and none is trained; add --use_peft, or leave it out"
                )
        return
    if not is_peft_available():
        raise ConfigError("use_peft: PEFT is not installed; pip install 'hf-zero[peft]'")
    refuse_less(arguments, lora_r=1, lora_alpha=1)
    if not 0 <= arguments.lora_dropout < 1:
        raise ConfigError(f"lora_dropout {arguments.lora_dropout}: expected 0 or more, and less than 1")


def check_quantization(arguments: QuantizationArguments, *, use_peft: bool) -> None:
    """Refuses what cannot work, before anything is loaded. Quantized weights themselves are not trained, but an
    adapter of them is."""
    is_quantized = arguments.load_in_4bit or arguments.load_in_8bit
    if is_quantized and not use_peft:
        raise ConfigError("load_in_4bit, load_in_8bit: quantized weights are not trained; add --use_peft")
    if arguments.load_in_4bit and arguments.load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit are both given; give one of them")
    if not arguments.load_in_4bit:
        for each in fields(QuantizationArguments):
            if each.name not in ("load_in_4bit", "load_in_8bit") and getattr(arguments, each.name) != each.default:
                raise ConfigError(f"{each.name}: describes a model in 4 bits; add --load_in_4bit, or leave it out")
    choose("bnb_4bit_quant_type", arguments.bnb_4bit_quant_type, dict.fromkeys(("nf4", "fp4")))
    if is_quantized and not is_bitsandbytes_available():
        raise ConfigError("load_in_4bit, load_in_8bit: bitsandbytes is not installed; pip install bitsandbytes")


def quantization_of(arguments: QuantizationArguments, dtype: str) -> "BitsAndBytesConfig | None":
    """Returns transformers' description of how the adapter's base is quantized, and computed with in `dtype`; `None`
    where it is not."""
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
    arguments: AdapterArguments, task_type: str | None = "CAUSAL_LM", new_modules: Sequence[str] = ()
) -> "LoraConfig | None":
    """Returns PEFT's configuration of the adapter; `None` where none is asked for. `task_type` is PEFT's name for what
    the model does; `new_modules` are in no checkpoint, and so are trained whole."""
    if not arguments.use_peft:
        return None
    from peft import LoraConfig

    targets = _targets(arguments)
    more = {} if arguments.lora_target_parameters is None else {"target_parameters": arguments.lora_target_parameters}
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets[0] if targets == [ALL_LINEAR] else targets,
        task_type=task_type,
        modules_to_save=[*new_modules, *(arguments.lora_modules_to_save or ())] or None,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
        **more,
    )


def adapt(
    model: PreTrainedModel,
    arguments: AdapterArguments,
    task_type: str | None = "CAUSAL_LM",
    new_modules: Sequence[str] = (),
) -> nn.Module:
    """Puts an adapter on a model, whose weights may be in files still, if `use_peft` is set. Returns the `PeftModel`,
    or the model as it was."""
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


def _targets(arguments: AdapterArguments) -> list[str]:
    """Returns the modules that get an adapter: none where only parameters are named."""
    return arguments.lora_target_modules or ([] if arguments.lora_target_parameters else [ALL_LINEAR])
