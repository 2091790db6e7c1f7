"""Measurements of a run: the peak memory of each rank by tensor class, and the moments of one step."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from hf_zero.checkpoint.folders import write_whole
from hf_zero.engine import require_engine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.unit import Unit
from hf_zero.planner import by_field, tensor_classes
from hf_zero.recipes.metrics import Progress, Telemetry, TrainingLog
from hf_zero.trainer import ZeroTrainer


# In the first step optimizers make their state; the third is like all that follow.
STEPS_BEFORE = 2
MEASURED_NAME = "measured.json"


@dataclass(frozen=True)
class Moment:
    """The memory of one rank at one moment."""

    phase: str  # "forward", "backward" or "optimizer"
    where: str  # the unit that is about to run, or what is about to be done
    # the fields of `MemoryReport`; on an accelerator also `activation_nbytes`, all else that is allocated there
    nbytes: dict[str, int]


@dataclass(frozen=True)
class Step:
    """One step of all ranks."""

    number: int
    moments: list[list[Moment]]  # by rank; of the first micro-batch, and around the optimizer's step
    sent_nbytes: list[dict[str, int]]  # by rank, what it sent of each unit, or read of the others' memory
    shares_memory: bool = False  # whether ranks share memory, so that nothing is sent

    @property
    def exchanged(self) -> str:
        """The way in which ranks exchanged `sent_nbytes`."""
        return "Read from shared memory" if self.shares_memory else "Sent"


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks."""

    memory: list[dict[str, int]]  # by rank, the largest values of the fields of `MemoryReport`, in bytes
    step: Step | None
    # what was told of the memory of a rank before the first step, by the same fields
    planned: dict[str, int] = field(default_factory=dict)

    def kept(self, path: Path, *, is_trained: bool) -> "Measured":
        """Writes the measurements to a file, or reads those of an earlier run if nothing was trained."""
        if is_trained:
            write_whole(path, json.dumps(asdict(self)).encode())
            return self
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            step = found["step"] and Step(**found["step"])
            if step is not None:
                moments = [[Moment(**moment) for moment in moments] for moments in found["step"]["moments"]]
                step = replace(step, moments=moments)
            return Measured(found["memory"], step, found.get("planned", {}))
        except (OSError, ValueError, KeyError, TypeError):
            return self  # there is none, or it was damaged: the report does without it


class Watch(TrainerCallback):
    """Measures the most that a rank holds of each tensor class, between backward and optimizer step, and one step, the
    third of a run or the last of a shorter one, moment by moment."""

    num_steps: int  # trained by this process, those of a checkpoint left out

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self.num_steps = 0
        # Bytes on this rank by field of `MemoryReport`; the optimizer state is in it from the second step on.
        self._largest: dict[str, int] = {}
        self._planned: dict[str, int] = {}  # what was told of them before the first step, as `plan` tells it
        self._number: int | None = None  # the step to watch; None before training
        self._is_on = False
        self._moments: list[Moment] = []
        self._sent: dict[str, int] = {}
        self._hooks: list[Any] = []  # while the first micro-batch runs

    @classmethod
    def attach(cls, trainer: ZeroTrainer) -> "Watch":
        """Adds it to a trainer that has not trained yet, and the callbacks that log and print metrics."""
        trainer.callback_handler.callbacks.insert(0, Telemetry(trainer))  # before others, which see its numbers
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(Progress())
        watch = cls(trainer)
        trainer.add_callback(watch)
        trainer.add_callback(TrainingLog(trainer))
        return watch

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self._number = min(state.global_step + STEPS_BEFORE, state.max_steps - 1) + 1
        if optimizer is not None:
            sharded = getattr(optimizer, "optimizer", optimizer)  # in accelerate's wrapper
            self._planned = by_field(tensor_classes(require_engine(self._trainer.model), sharded))

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 != self._number:
            return
        self._is_on = True
        self._sent = dict(require_engine(self._trainer.model).comm.counters.unit_nbytes)
        self._note("forward", "begin")
        for unit, module in require_engine(self._trainer.model).modules.items():
            self._hooks.append(module.register_forward_pre_hook(partial(self._before_forward, unit)))
            self._hooks.append(module.register_forward_hook(partial(self._hook_backward, unit)))

    def on_substep_end(self, args, state, control, **kwargs):
        self._unhook()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._unhook()
        self._measure()
        if self._is_on:
            self._note("optimizer", "before the update")

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1
        if self._is_on:
            self._is_on = False
            self._note("optimizer", "after the update")
            engine, before = require_engine(self._trainer.model), self._sent
            after = engine.comm.counters.unit_nbytes
            self._sent = {u.name: after.get(u.name, 0) - before.get(u.name, 0) for u in engine.units}

    def on_train_end(self, args, state, control, **kwargs):
        self._measure()  # a run of one step has no state before it

    def memory(self) -> list[dict[str, int]]:
        """Returns the largest values of the fields of `MemoryReport`, by rank. All ranks call it after training."""
        return require_engine(self._trainer.model).comm.all_gather_object(self._largest)

    def gather(self) -> Measured:
        """Returns the measurements of all ranks. All ranks call it after training."""
        comm = require_engine(self._trainer.model).comm
        moments, sent = zip(*comm.all_gather_object((self._moments, self._sent)), strict=True)
        step = Step(self._number, list(moments), list(sent), comm.shard_group.shared_memory is not None)
        return Measured(self.memory(), step if self._moments else None, self._planned)

    def _measure(self) -> None:
        for name, nbytes in asdict(self._trainer.memory_report()).items():
            self._largest[name] = max(nbytes, self._largest.get(name, 0))

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
