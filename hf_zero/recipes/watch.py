"""All that watches a run while it trains."""

from dataclasses import dataclass

from hf_zero.recipes.log import TrainingLog
from hf_zero.recipes.memory import MemoryRecorder
from hf_zero.recipes.progress import Progress
from hf_zero.recipes.step_trace import StepTrace
from hf_zero.recipes.telemetry import Telemetry
from hf_zero.trainer import ZeroTrainer


@dataclass(frozen=True)
class Watch:
    """The callbacks whose findings are asked for when training is over.

    Args:
        memory ([`MemoryRecorder`]): the most that was held.
        step ([`StepTrace`]): one step.
    """

    memory: MemoryRecorder
    step: StepTrace

    @classmethod
    def attach(cls, trainer: ZeroTrainer) -> "Watch":
        """Adds them to a trainer, and those that log and show.

        Args:
            trainer ([`ZeroTrainer`]): That has not trained yet.
        """
        Telemetry.attach(trainer)
        Progress.attach(trainer)
        watch = cls(MemoryRecorder(trainer), StepTrace(trainer))
        for callback in (watch.memory, watch.step, TrainingLog(trainer)):
            trainer.add_callback(callback)
        return watch
