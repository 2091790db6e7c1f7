"""Measurements of a run: the peak memory of each rank by tensor class, and the moments of one step."""

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_zero.checkpoint.folders import write_whole
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.unit import Unit
from hf_zero.planner import by_field, tensor_classes
from hf_zero.recipes.metrics import Progress, Telemetry, TrainingLog
from hf_zero.trainer import ZeroTrainer


# In the first step optimizers make their state; the third is like all that follow.
STEPS_BEFORE = 2
MEASURED_NAME = "measured.json"


class MemoryRecorder(TrainerCallback):
    """Keeps the largest value of each field of `MemoryReport`, measured between backward and optimizer step."""

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
        """Returns `largest` of all ranks. All ranks call it after training."""
        return self._trainer._engine.comm.all_gather_object(self.largest)

    def _measure(self) -> None:
        for name, nbytes in asdict(self._trainer.memory_report()).items():
            self.largest[name] = max(nbytes, self.largest.get(name, 0))


@dataclass(frozen=True)
class Moment:
    """The memory of one rank at one moment.

    Args:
        phase (`str`): "forward", "backward" or "optimizer".
        where (`str`): the unit that is about to run, or what is about to be done.
        nbytes (`dict[str, int]`): the fields of `MemoryReport`; on an accelerator also `activation_nbytes`, all else
            that is allocated there.
    """

    phase: str
    where: str
    nbytes: dict[str, int]


@dataclass(frozen=True)
class Step:
    """One step of all ranks.

    Args:
        number (`int`): which.
        moments (`list[list[Moment]]`): by rank; of the first micro-batch, and around the optimizer's step.
        sent_nbytes (`list[dict[str, int]]`): by rank, what it sent of each unit, or read of the others' memory.
        shares_memory (`bool`): whether ranks share memory, so that nothing is sent.
    """

    number: int
    moments: list[list[Moment]]
    sent_nbytes: list[dict[str, int]]
    shares_memory: bool = False

    @property
    def exchanged(self) -> str:
        """How ranks exchanged `sent_nbytes`."""
        return "Read from shared memory" if self.shares_memory else "Sent"


class StepTrace(TrainerCallback):
    """Records the third step of a run, or the last step of a shorter one."""

    num_steps: int  # trained by this process, those of a checkpoint left out

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self.num_steps = 0
        self._number: int | None = None  # the step to watch; None before training
        self._is_on = False
        self._moments: list[Moment] = []
        self._sent: dict[str, int] = {}
        self._hooks: list[Any] = []  # while the first micro-batch runs

    def on_train_begin(self, args, state, control, **kwargs):
        self._number = min(state.global_step + STEPS_BEFORE, state.max_steps - 1) + 1

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 != self._number:
            return
        self._is_on = True
        self._sent = dict(self._trainer._engine.comm.counters.unit_nbytes)
        self._note("forward", "begin")
        for unit, module in self._trainer._engine.modules.items():
            self._hooks.append(module.register_forward_pre_hook(partial(self._before_forward, unit)))
            self._hooks.append(module.register_forward_hook(partial(self._hook_backward, unit)))

    def on_substep_end(self, args, state, control, **kwargs):
        self._unhook()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._unhook()
        if self._is_on:
            self._note("optimizer", "before the update")

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1
        if self._is_on:
            self._is_on = False
            self._note("optimizer", "after the update")
            engine, before = self._trainer._engine, self._sent
            after = engine.comm.counters.unit_nbytes
            self._sent = {u.name: after.get(u.name, 0) - before.get(u.name, 0) for u in engine.units}

    def gather(self) -> Step | None:
        """Returns the step of all ranks, or `None` if none was recorded. All ranks call it after training."""
        comm = self._trainer._engine.comm
        rows = comm.all_gather_object((self._moments, self._sent))
        if not self._moments:
            return None
        return Step(
            self._number, [moments for moments, _ in rows], [sent for _, sent in rows], comm.shared_memory is not None
        )

    def _before_forward(self, unit: Unit, _module: nn.Module, _args: tuple) -> None:
        # within backward it is a checkpointed block, computed again
        in_backward = any(moment.phase == "backward" for moment in self._moments)
        self._note("backward" if in_backward else "forward", unit.name)

    def _hook_backward(self, unit: Unit, _module: nn.Module, _args: tuple, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._before_backward, unit))
                return

    def _before_backward(self, unit: Unit, _grad: Tensor) -> None:
        if self._hooks:
            self._note("backward", unit.name)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, phase: str, where: str) -> None:
        nbytes = asdict(self._trainer.memory_report())
        device = self._trainer.args.device
        if device.type == "cuda":
            held = sum(nbytes[f"{name}_nbytes"] for name in ("parameter", "gradient", "optimizer", "buffer"))
            nbytes["activation_nbytes"] = max(0, torch.cuda.memory_allocated(device) - held)
        self._moments.append(Moment(phase, where, nbytes))


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks.

    Args:
        memory (`list[dict[str, int]]`): by rank, the largest values of the fields of `MemoryReport`, in bytes.
        step ([`Step`], *optional*): the step that was watched.
        planned (`dict[str, int]`): what was told of the memory of a rank before the first step, by the same fields.
    """

    memory: list[dict[str, int]]
    step: Step | None
    planned: dict[str, int] = field(default_factory=dict)

    def kept(self, path: Path, *, is_trained: bool) -> "Measured":
        """Writes the measurements to a file, or reads those of an earlier run if nothing was trained.

        Args:
            path (`Path`): The file.
            is_trained (`bool`): Whether there was a step to train.
        """
        if is_trained:
            write_whole(path, json.dumps(asdict(self)).encode())
            return self
        try:
            return _of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return self  # there is none, or it was damaged: the report does without it


def _of(content: dict[str, Any]) -> Measured:
    step = content["step"]
    if step is not None:
        moments = [[Moment(**moment) for moment in moments] for moments in step["moments"]]
        step = Step(step["number"], moments, step["sent_nbytes"], step.get("shares_memory", False))
    return Measured(content["memory"], step, content.get("planned", {}))


@dataclass(frozen=True)
class Watch:
    """The callbacks that measure a run.

    Args:
        memory ([`MemoryRecorder`]): the most that was held.
        step ([`StepTrace`]): one step.
    """

    memory: MemoryRecorder
    step: StepTrace

    @classmethod
    def attach(cls, trainer: ZeroTrainer) -> "Watch":
        """Adds these callbacks to a trainer, and those that log and print metrics.

        Args:
            trainer ([`ZeroTrainer`]): That has not trained yet.
        """
        Telemetry.attach(trainer)
        Progress.attach(trainer)
        watch = cls(MemoryRecorder(trainer), StepTrace(trainer))
        for callback in (watch.memory, watch.step, TrainingLog(trainer)):
            trainer.add_callback(callback)
        return watch

    def gather(self) -> Measured:
        """Returns the measurements of all ranks. All ranks call it after training."""
        return Measured(self.memory.gather(), self.step.gather(), self.memory.planned)
