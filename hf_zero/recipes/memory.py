"""Measures memory while there is something to measure: gradients are gone once the optimizer has stepped."""

from dataclasses import asdict

from transformers import TrainerCallback

from hf_zero.planner import by_field, tensor_classes
from hf_zero.trainer import ZeroTrainer


class MemoryRecorder(TrainerCallback):
    """Keeps the largest value of every field of `MemoryReport` over all moments between backward and optimizer step.

    Args:
        trainer ([`ZeroTrainer`]): The trainer that is asked.
    """

    largest: dict[str, int]  # bytes on this rank, by field; the optimizer state is in it from the second step on
    planned: dict[str, int]  # what was told of them before the first step, as `plan` tells it

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self.largest = {}
        self.planned = {}

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        sharded = getattr(optimizer, "optimizer", optimizer)  # in accelerate's wrapper
        self.planned = by_field(tensor_classes(self._trainer._engine, sharded))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._measure()

    def on_train_end(self, args, state, control, **kwargs):
        self._measure()  # a run of one step has no state before it

    def gather(self) -> list[dict[str, int]]:
        """`largest` of all ranks, in their order. All ranks call it after training."""
        return self._trainer._engine.comm.all_gather_object(self.largest)

    def _measure(self) -> None:
        for name, nbytes in asdict(self._trainer.memory_report()).items():
            self.largest[name] = max(nbytes, self.largest.get(name, 0))
