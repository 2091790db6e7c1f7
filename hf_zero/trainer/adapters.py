"""PEFT adapters: few trainable parameters among frozen ones, saved whole by rank 0."""

from torch import nn

from hf_zero.engine import ZeroEngine, gathered


def is_adapter_model(model: nn.Module) -> bool:
    """Whether a model is a PEFT model. PEFT is imported only by those who use it."""
    return any(cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def save_adapters(engine: ZeroEngine, folder: str) -> None:
    """Writes the adapters of a PEFT model as PEFT does. One unit is whole at a time. All ranks call it.

    Args:
        engine (`ZeroEngine`): of the PEFT model.
        folder (`str`): where to write.
    """
    state = {}
    for unit in engine.units:
        trainable = [(info.name, p) for flat in unit.flats if flat.trainable for info, p in zip(flat.infos, flat.params)]
        if trainable:
            with gathered([p for _, p in trainable]):
                if engine.comm.rank == 0:
                    state.update({name: p.detach().cpu().clone() for name, p in trainable})
    if engine.comm.rank == 0:
        engine.model.save_pretrained(folder, state_dict=state)
    engine.comm.barrier()
