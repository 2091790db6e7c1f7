"""Callbacks of every training run: a memory report at the start, and a loss comparison after resuming."""

import logging
import sys
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_zero.planner import render_classes, tensor_classes


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


class TellMemory(TrainerCallback):
    """Prints a memory report to stderr on rank 0, one line per tensor class: purpose, dtype, bytes per rank."""

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        engine, optimizer = self._trainer._engine, self._trainer._prepared_optimizer
        ranks = f"{engine.comm.num_ranks} rank{'s' if engine.comm.num_ranks > 1 else ''}"
        if engine.comm.num_replicas > 1:
            ranks += f" in shard groups of {engine.comm.shard_group.num_ranks}"
        lines = render_classes(tensor_classes(engine, optimizer))  # on every rank, so that an error occurs on all
        late = "".join(f"\n  plus the state of {name} after the first step" for name in optimizer.late_state)
        if state.is_world_process_zero:
            text = f"hf_zero: stage {engine.stage} over {ranks}; each holds, besides activations:\n{lines}{late}"
            tqdm.write(text, file=sys.stderr)


class CompareLoss(TrainerCallback):
    """Warns if the first loss after resuming is much higher than the last loss before it, which indicates different
    data, another model or other settings."""

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer
        self._before: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        before = self._trainer.resumed
        self._before = before.loss if before.accumulation == args.gradient_accumulation_steps else None

    def on_step_end(self, args, state, control, **kwargs):
        before, self._before = self._before, None
        if before is None:
            return
        after = self._trainer.accelerator.last_step.mean_loss(self._trainer._engine)
        if state.is_world_process_zero and (after is None or after > 1.5 * before + 0.1):
            logger.warning(
                "step %d: the first loss after resuming is %s, the last loss before it was %s; check that data, model "
                "and settings match the checkpoint",
                state.global_step,
                after,
                before,
            )
