"""The callback of every training run: a memory report at the start."""

import sys
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_zero.planner import render_classes, tensor_classes


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin


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
