"""PEFT adapters: few parameters beside a frozen model, saved whole by rank 0, read back in ranges by every rank."""

import os

import torch
from torch import Tensor, nn

from hf_zero.checkpoint import load_weights
from hf_zero.checkpoint.agreement import on_first, together
from hf_zero.checkpoint.weight_files import ADAPTER_WEIGHTS_NAME
from hf_zero.engine import ZeroEngine, gathered
from hf_zero.errors import UnsupportedError


def is_adapter_model(model: nn.Module) -> bool:
    """Whether a model is a PEFT model. PEFT is imported only by those who use it."""
    return any(cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def save_adapters(engine: ZeroEngine, folder: str) -> None:
    """Writes all adapters of a PEFT model as PEFT does. One unit is whole at a time. All ranks call it.

    Args:
        engine (`ZeroEngine`): of the PEFT model.
        folder (`str`): where to write.
    """
    wanted = {name for adapter in engine.model.peft_config for name in adapter_keys(engine.model, adapter)}
    state: dict[str, Tensor] = {}
    for unit in engine.units:
        pairs = [pair for flat in unit.flats for pair in zip(flat.infos, flat.params, strict=True)]
        held = [(info.name, p) for info, p in pairs if info.name in wanted]
        if held:
            with gathered([p for _, p in held]):
                if engine.comm.rank == 0:
                    state.update({name: p.detach().cpu().clone() for name, p in held})
    write = on_first(engine.comm, lambda: engine.model.save_pretrained(folder, state_dict=state))
    with gathered(_module_copies(engine.model)):
        together(engine.comm, f"saving adapters to {folder}", write)


def load_adapters(engine: ZeroEngine, folder: str) -> None:
    """Reads the adapters that `save_adapters` or PEFT wrote: every rank its own ranges. All ranks call it.

    Args:
        engine (`ZeroEngine`): of the PEFT model.
        folder (`str`): where they lie; every adapter but "default" has a folder of its own there.

    Raises:
        `CheckpointError`: an adapter is missing, damaged, or of other shapes.
    """
    for adapter in engine.model.peft_config:
        own = folder if adapter == "default" else os.path.join(folder, adapter)
        load_weights(engine, own, weights_name=ADAPTER_WEIGHTS_NAME, keys=adapter_keys(engine.model, adapter))


def adapter_keys(model: nn.Module, adapter: str) -> dict[str, str]:
    """The parameters of one adapter, and their names in its file. All ranks call it.

    PEFT knows: it is given empty tensors in place of the parameters, and hands out those that belong to the adapter.

    Raises:
        `UnsupportedError`: for adapters whose file holds something else than parameters, such as learned prompts.
    """
    from peft import get_peft_model_state_dict

    if model.peft_config[adapter].is_prompt_learning:
        raise UnsupportedError(
            f"adapter {adapter!r} ({model.peft_config[adapter].peft_type}): its file holds prompts computed from its "
            "parameters; use an adapter of weights, such as LoRA"
        )
    empty = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    name_of = {id(tensor): name for name, tensor in empty.items()}
    with gathered(_module_copies(model)):
        kept = get_peft_model_state_dict(model, state_dict=empty, adapter_name=adapter)
    strange = [key for key, tensor in kept.items() if id(tensor) not in name_of]
    if strange:
        raise UnsupportedError(f"adapter {adapter!r}: {strange[0]} in its file is none of the model's parameters")
    return {name_of[id(tensor)]: key for key, tensor in kept.items()}


def _module_copies(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the modules that PEFT trains as whole copies (`modules_to_save`), whose state dicts it reads."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    copies = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    return [p for module in copies for p in module.parameters()]
