"""The base class of the parts of `ZeroTrainerMixin`: arguments, engine and optimizer."""

from typing import TYPE_CHECKING

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.engine import MemoryReport, ZeroEngine, require_engine
from hf_zero.engine.memory import measure
from hf_zero.optim import ShardedOptimizer, sharded_of
from hf_zero.trainer.arguments import ZeroArgumentsMixin


if TYPE_CHECKING:  # type checkers see what the mixin stands before; which trainer that is, is the user's choice
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class ZeroTrainerBase(_Trainer):
    """The part of `ZeroTrainerMixin` on which the other parts build."""

    args: ZeroArgumentsMixin
    accelerator: ZeroAccelerator
    leaves_model: bool = False

    @property
    def place_model_on_device(self) -> bool:
        """Always false, whatever `Trainer` sets: the engine moves the shards, and nothing moves the whole model."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, value: object) -> None:
        pass

    @property
    def _engine(self) -> ZeroEngine:
        """The engine that holds the model, which must have been prepared before."""
        return require_engine(self.model)

    @property
    def _zero_optimizer(self) -> ShardedOptimizer | None:
        return sharded_of(self.optimizer)

    @property
    def _prepared_optimizer(self) -> ShardedOptimizer:
        optimizer = self._zero_optimizer
        assert optimizer is not None, "the optimizer is not prepared yet"
        return optimizer

    def memory_report(self) -> MemoryReport:
        """Measures the bytes that this rank holds, see [`ShardedModel.memory`]."""
        return measure(self.accelerator.shard(self.model))
