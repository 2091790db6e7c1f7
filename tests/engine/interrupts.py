"""Breaks training off at the n-th call of a function of the package, on one rank or on all, and says what came of it.

The ranks are threads of one process (`run_loopback`), so a trial takes some hundredths of a second. It is three steps,
of which the second breaks off; `Policy` says how its loop goes on. Afterwards the weights are those of an unbroken run
over some of the batches, bit for bit, or nobody can save them.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hf_zero
from hf_zero.comm.loopback import LoopbackComm, run_loopback
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.errors import CommError, LifecycleError
from tests.engine.models import Tower, inputs, loss_of


PACKAGE = str(Path(hf_zero.__file__).parent)
# Whoever waits so long waits for a rank that has broken off. Where the machine is slow a trial that would have gone
# on counts as one that did not, which no test minds.
PATIENCE_SECONDS = 0.4
CPU = torch.device("cpu")


class Phase(Enum):
    """A part of a step, in order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    STEP = "step"


class Policy(Enum):
    """What the loop does when it has caught an exception within a step."""

    RETRY = "drops the gradients, and takes the step once more"
    SKIP = "drops the gradients, and leaves the step out"
    GO_ON = "goes on behind the call that raised"
    AGAIN = "makes the call that raised once more, and goes on"


@dataclass(frozen=True)
class Outcome:
    """What came of a trial on one rank.

    Args:
        where: the function that was broken off; None where there were not so many calls.
        weights: at the end; None where they could not be saved, or the training did not come to its end.
        refusal: why not.
    """

    where: str | None
    weights: Tensor | None
    refusal: str | None


def _is_counted(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.endswith("loopback.py")  # on which nothing trains


class Break:
    """Raises within a call of a function of the package on this thread, while `counting` lasts.

    Args:
        call: which, counted from 1, or by name: the first; None for none.
    """

    def __init__(self, call: int | str | None):
        self.num_calls = 0
        self.where: str | None = None
        self._call = call

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame, event: str, _argument):
        code = frame.f_code
        if code.co_name in ("<genexpr>", "<listcomp>"):  # as one goes, what it raises is lost
            return
        if event == "call" and self.where is None and _is_counted(code.co_filename):
            self.num_calls += 1
            if self._call in (self.num_calls, code.co_qualname):
                self.where = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
                raise KeyboardInterrupt


class StepInTune(LoopbackComm):
    """A loop-back that notices when the ranks do different things at the same time, as connections between processes
    do by the order and size of what they carry."""

    def _copies(self, way: str, own: Any, act: Callable[[list], None]):
        sizes = (own.dtype, own.numel()) if isinstance(own, Tensor) else ()
        self._check(way, (act.__qualname__, *sizes))
        return super()._copies(way, own, act)

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        self._check("small", what)
        return super().all_gather_object(obj, what=what)

    def _check(self, way: str, what: object) -> None:
        if len(set(self._swap(way, what))) > 1:
            self._loop.abort()
            raise CommError(f"{what}: the ranks do not run the same program")


@cache
def _tower() -> Tower:
    torch.manual_seed(3)
    return Tower(num_blocks=2)


class Trial:
    """One rank's training.

    Args:
        comm: the ranks.
        settings: of `ZeroConfig`, and `compute_dtype`.
    """

    def __init__(self, comm: LoopbackComm, settings: dict):
        self.rank = comm.rank
        self.dtype = settings.get("compute_dtype", torch.float32)
        self.engine = build(copy.deepcopy(_tower()), ZeroConfig(**settings), comm)
        self.model = self.engine.model
        make = {"lr": 0.05, "weight_decay": 0.1}
        self.optimizer = hf_zero.ShardedOptimizer(self.engine, torch.optim.AdamW, **make)
        self._loss: Tensor | None = None

    def do(self, phase: Phase, step: int) -> None:
        if phase is Phase.FORWARD:
            self._loss = loss_of(self.model(inputs(self.rank, step).to(self.dtype)).float())
        elif phase is Phase.BACKWARD and self._loss is not None:
            loss, self._loss = self._loss, None
            loss.backward()
        elif phase is Phase.CLIP:
            self.optimizer.clip_grad_norm_(0.1)
        elif phase is Phase.STEP:
            self.optimizer.step()

    def step(self, step: int) -> None:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.STEP):
            self.do(phase, step)
        self.optimizer.zero_grad()

    def broken_step(self, step: int, breaks: Phase, policy: Policy, at: Break) -> None:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.STEP):
            try:
                with at.counting() if phase is breaks else _nothing():
                    self.do(phase, step)
            except KeyboardInterrupt:
                if policy in (Policy.RETRY, Policy.SKIP):
                    break
                if policy is Policy.AGAIN:
                    self.do(phase, step)
        self._loss = None
        self.optimizer.zero_grad()
        if policy is Policy.RETRY and at.where is not None:
            self.step(step)

    def weights(self) -> Tensor:
        """What a checkpoint would hold: the masters, whole."""
        self.engine.check_before_save()
        parts = [(shard.name, shard.start, shard.tensor.clone()) for shard in self.engine.named_shards()]
        everyones = [part for own in self.engine.comm.all_gather_object(parts) for part in own]
        return torch.cat([values for *_, values in sorted(everyones, key=lambda part: part[:2])])


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _outcome(comm: LoopbackComm, settings: dict, act: Callable[[Trial], None], at: Break) -> Outcome:
    try:
        trial = Trial(comm, settings)
        act(trial)
        weights = trial.weights()
        trial.step(3)  # what is not saved: compute copies, moments, what slots hold
        return Outcome(at.where, torch.cat([weights, trial.weights()]), None)
    except (CommError, LifecycleError) as error:
        if isinstance(error, CommError):
            comm._loop.abort()  # nobody waits for this rank
        return Outcome(at.where, None, f"{type(error).__name__}: {error}")
    except BaseException as error:
        comm._loop.abort()
        error.add_note(f"broken off at {at.where}")
        raise


def _run(num_ranks: int, act: Callable[[LoopbackComm], Outcome]) -> list[Outcome]:
    _tower()  # random numbers are one sequence for all threads
    with mock.patch("hf_zero.comm.loopback.LoopbackComm", StepInTune):
        return run_loopback(num_ranks, act, CPU, timeout_seconds=PATIENCE_SECONDS)


def unbroken(num_ranks: int, settings: dict, steps: tuple[int, ...]) -> Tensor:
    """What a run over some batches ends with."""

    def act(trial: Trial) -> None:
        for step in steps:
            trial.step(step)

    with mock.patch(f"{__name__}.PATIENCE_SECONDS", 60.0):
        first, *_ = _run(num_ranks, lambda comm: _outcome(comm, settings, act, Break(None)))
    assert first.weights is not None, first.refusal
    return first.weights


def broken(
    num_ranks: int, settings: dict, breaks: Phase, policy: Policy, call: int | str | None, *, on: int | None
) -> tuple[list[Outcome], int]:
    """Makes one trial.

    Args:
        breaks, call: what breaks off, and at which call within it, see `Break`; None counts them.
        on: the rank; None for all.

    Returns:
        what came of it, by rank, and how many calls there were.
    """
    counts = [0] * num_ranks

    def play(comm: LoopbackComm) -> Outcome:
        at = Break(call if on in (None, comm.rank) else None)

        def act(trial: Trial) -> None:
            trial.step(0)
            trial.broken_step(1, breaks, policy, at)
            trial.step(2)

        outcome = _outcome(comm, settings, act, at)
        counts[comm.rank] = at.num_calls
        return outcome

    return _run(num_ranks, play), max(counts)
