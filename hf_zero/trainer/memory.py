"""What each rank is going to hold, told when training starts."""

import sys

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_zero.planner import render_classes, tensor_classes


class TellMemory(TrainerCallback):
    """Prints one line per tensor class on rank 0, on stderr: purpose, dtype, bytes per rank.

    Args:
        trainer (`ZeroTrainerMixin`): whose model trains.
    """

    def __init__(self, trainer):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        engine, optimizer = self._trainer.zero_engine, self._trainer._zero_optimizer
        ranks = f"{engine.comm.num_ranks} rank{'s' if engine.comm.num_ranks > 1 else ''}"
        lines = render_classes(tensor_classes(engine, optimizer))  # on every rank: what fails here fails on all
        late = "".join(f"\n  and the state of {name}, from the first step on" for name in optimizer.late_state)
        if state.is_world_process_zero:
            text = f"hf_zero: stage {engine.stage} over {ranks}; beside activations each holds\n{lines}{late}"
            tqdm.write(text, file=sys.stderr)
