"""The log of a run as lines of JSON: one for each time that Trainer logs, whatever else it reports to."""

import json
import math
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy


LOG_NAME = "training_log.jsonl"


class TrainingLog(TrainerCallback):
    """Writes what is logged to a file, on rank 0. A run that is resumed goes on with the log of its checkpoint.

    The last step is logged, whatever `logging_steps` is.

    Args:
        trainer (`Trainer`): What was evaluated before it trains goes into its history too, as of step 0.
    """

    def __init__(self, trainer: Trainer):
        self._path = Path(trainer.args.output_dir) / LOG_NAME
        self._before: list[dict[str, Any]] | None = []  # None from the beginning of the training on

    def on_log(self, args, state, control, logs=None, **kwargs):
        entry = {**logs, "step": state.global_step}
        if self._before is not None:
            self._before.append(entry)
        elif state.is_world_process_zero:
            self._write("a", [entry])

    def on_step_end(self, args, state, control, **kwargs):
        # Trainer logs by its interval alone: the end of a curve would be missing, and of a short run all of it
        if state.global_step >= state.max_steps and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            state.log_history[:0] = self._before
        self._before = None
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write("w", state.log_history)

    def _write(self, mode: str, entries: list[dict[str, Any]]) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            for entry in entries:
                file.write(json.dumps({name: _known(value) for name, value in entry.items()}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, oldest first; a last line that was cut off is left out.

    Args:
        path (`Path`): The file.
    """
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _known(value: Any) -> Any:
    """As JSON knows it: numbers that are not finite become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
