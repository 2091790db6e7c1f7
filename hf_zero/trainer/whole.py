"""Trainers that write the weights by a method of their own, as those of sentence-transformers do.

What such a method writes, and under which names, it alone knows. So rank 0 calls it on a model that shows whole
values, which were gathered on its CPU unit by unit. All ranks write the parameters beside that, in ranges, and read
them to go on.
"""

import os
from collections.abc import Callable

from torch import nn
from torch.func import functional_call
from transformers import Trainer

from hf_zero.accelerator.states import whole_state_dict
from hf_zero.checkpoint import load_weights, plan_weights
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.engine import ZeroEngine
from hf_zero.errors import MissingCheckpointError
from hf_zero.trainer.trainer_base import ZeroTrainerBase


PARAMETERS_NAME = "parameters.safetensors"


def saves_whole(cls: type) -> bool:
    """Whether the class behind the mixins has a `_save` of its own."""
    behind = cls.__mro__[cls.__mro__.index(ZeroTrainerBase) + 1 :]
    return next(base for base in behind if "_save" in vars(base)) is not Trainer


def plan_parameters(engine: ZeroEngine) -> StagedFiles:
    """Plans the parameters and buffers under the model's own names. All ranks call it."""
    return plan_weights(engine, weights_name=PARAMETERS_NAME, keys=_keys(engine), write_beside=lambda _: None)


def load_parameters(engine: ZeroEngine, folder: str | os.PathLike) -> None:
    """Reads what `plan_parameters` has planned, every rank its own ranges. All ranks call it."""

    def check() -> None:
        if not os.path.isfile(os.path.join(folder, PARAMETERS_NAME)):
            raise MissingCheckpointError(
                f"{folder}: holds no {PARAMETERS_NAME}, so it is no checkpoint of this trainer with ZeRO; load the "
                "model from it and start a new run, or give another checkpoint"
            )

    run_on_all_ranks(engine.comm, f"loading {folder}", check)
    load_weights(engine, folder, weights_name=PARAMETERS_NAME, keys=_keys(engine))


def with_whole_values(engine: ZeroEngine, act: Callable[[], None]) -> Callable[[], None]:
    """Returns `act` on rank 0, for a model that shows whole values meanwhile, in the dtypes in which they are saved.
    On other ranks it returns what does nothing. All ranks call it."""
    whole = whole_state_dict(engine)
    if engine.comm.rank:
        return lambda: None
    values = {f"model.{info.name}": whole[info.name].to(info.save_dtype) for info in engine.param_infos()}
    return lambda: functional_call(_Act(engine.model, act), values, ())


def _keys(engine: ZeroEngine) -> dict[str, str]:
    return {name: name for name, _ in named_tensors(engine.model)}


class _Act(nn.Module):
    def __init__(self, model: nn.Module, act: Callable[[], None]):
        super().__init__()
        self.model, self._act = model, act

    def forward(self) -> None:
        self._act()
