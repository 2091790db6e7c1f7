"""The progress bar's lines: what a person wants to see of a step, in one line."""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ProgressCallback

from hf_zero.trainer.card import NO_METRICS


NOT_SHOWN = ("total_flos", "zero/seconds", "zero/tokens_per_second_per_rank", "zero/peak_memory_mib", "step")


class Progress(ProgressCallback):
    """Trainer's progress bar, with lines that are read more easily than dicts."""

    @classmethod
    def attach(cls, trainer: Trainer) -> None:
        """Takes the place of the trainer's progress bar, if it has one."""
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(cls())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line_of(logs, state.global_step, state.max_steps))


def line_of(logs: Mapping[str, Any], step: int, max_steps: int) -> str:
    """One line for an entry of the log.

    Args:
        logs (`Mapping[str, Any]`): The entry.
        step (`int`): At which it was made.
        max_steps (`int`): How many there are.
    """
    shown = [_shown(name, value, logs) for name, value in logs.items() if _is_shown(name)]
    return "  ".join([f"step {step}/{max_steps}", *shown])


def _is_shown(name: str) -> bool:
    return name not in NOT_SHOWN and not NO_METRICS.match(name)


def _shown(name: str, value: Any, logs: Mapping[str, Any]) -> str:
    if name == "zero/tokens_per_second":
        each = logs.get("zero/tokens_per_second_per_rank", value)
        return f"{_short(value)} tokens/s" + ("" if each == value else f" ({_short(each)} per rank)")
    if name == "zero/memory_mib":
        return f"memory {value:.0f} MiB (peak {logs.get('zero/peak_memory_mib', value):.0f})"
    if name == "zero/mfu":
        return f"MFU {value:.1%}"
    words = name.removeprefix("zero/").replace("learning_rate", "lr").replace("_", " ")
    return f"{words} {value:.4g}" if isinstance(value, float) else f"{words} {value}"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
