"""Keys for LoRA adapters, under the names of TRL, and making an adapter."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from hf_zero.engine import placeholders
from hf_zero.errors import ConfigError


if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"


@dataclass
class AdapterArguments:
    """Keys for the adapter that is trained in place of the model."""

    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter; the model itself stays as it is."})
    lora_r: int = field(default=16, metadata={"help": "The rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter counts lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout of what the adapter reads."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": f"Names of the modules that get an adapter; by default {ALL_LINEAR}."}
    )


def check_adapter(arguments: AdapterArguments) -> None:
    """Refuses settings of an adapter that cannot work.

    Raises:
        ConfigError: PEFT is not there, a value is out of range, or an adapter is described that is not asked for.
    """
    if not arguments.use_peft:
        for described in fields(AdapterArguments):
            if getattr(arguments, described.name) != described.default:
                raise ConfigError(
                    f"{described.name}: describes an adapter, and none is trained; add --use_peft, or leave it out"
                )
        return
    if not is_peft_available():
        raise ConfigError("use_peft: PEFT is not installed; pip install 'hf-zero[peft]'")
    for name, least in (("lora_r", 1), ("lora_alpha", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"{name} {getattr(arguments, name)}: expected {least} or more")
    if not 0 <= arguments.lora_dropout < 1:
        raise ConfigError(f"lora_dropout {arguments.lora_dropout}: expected 0 or more, and less than 1")


def lora_config(
    arguments: AdapterArguments, task_type: str | None = "CAUSAL_LM", new_modules: Sequence[str] = ()
) -> "LoraConfig | None":
    """Returns PEFT's configuration of the adapter.

    Args:
        arguments ([`AdapterArguments`]): say which.
        task_type (`str`, *optional*): PEFT's name for what the model does, such as `"SEQ_CLS"`.
        new_modules (`Sequence[str]`): parts of the model that no checkpoint has, and which are trained whole.

    Returns:
        `LoraConfig`, or `None` where no adapter is asked for.
    """
    if not arguments.use_peft:
        return None
    from peft import LoraConfig

    targets = _targets(arguments)
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets[0] if targets == [ALL_LINEAR] else targets,
        task_type=task_type,
        modules_to_save=list(new_modules) or None,
    )


def adapt(
    model: PreTrainedModel,
    arguments: AdapterArguments,
    task_type: str | None = "CAUSAL_LM",
    new_modules: Sequence[str] = (),
) -> nn.Module:
    """Puts an adapter on a model if `use_peft` is set.

    Args:
        model (`PreTrainedModel`): its weights may be in files still.
        arguments ([`AdapterArguments`]): say which.
        task_type (`str`, *optional*): see `lora_config`, and
        new_modules (`Sequence[str]`): likewise.

    Returns:
        `nn.Module`: a `PeftModel`, or the model as it was.

    Raises:
        ConfigError: the model has no such modules.
    """
    config = lora_config(arguments, task_type, new_modules)
    if config is None:
        return model
    from peft import get_peft_model

    try:
        with placeholders(model):
            return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"lora_target_modules {_targets(arguments)}: {reason}") from error


def _targets(arguments: AdapterArguments) -> list[str]:
    return arguments.lora_target_modules or [ALL_LINEAR]
