"""Breaks training off at the n-th call of a function of the package, on one rank or on all, and says what came of it.

The ranks are threads of one process (`run_loopback`), so a trial takes some hundredths of a second. It is three steps,
of which the second breaks off; `Policy` says how its loop goes on. Afterwards the weights are those of an unbroken run
over some of the batches, bit for bit, or nobody can save them.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.activation.shard_model import place_and_divide_activations
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.errors import CommError, LifecycleError
from tests import loopback
from tests.engine.models import Tower, inputs, loss_of
from tests.loopback import LoopbackComm, run_loopback


PACKAGE = str(Path(hf_zero.__file__).parent)
# Whoever waits so long waits for a rank that has broken off. Where the machine is slow a trial that would have gone
# on counts as one that did not; a test that minds has more.
PATIENCE_SECONDS, MUCH_PATIENCE_SECONDS = 0.4, 60.0
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
class World:
    """How a trial trains.

    Args:
        settings: of `ZeroConfig`.
        shard_size: how many ranks a shard group has; None for all.
        num_blocks: of the model.
        num_micro_batches: before a step.
        in_backward: what rests on the host is updated there.
        is_scaled: the loss is, as in fp16.
        tells: the engine, which backward of a step is the last.
    """

    num_ranks: int
    settings: dict = field(hash=False)
    shard_size: int | None = None
    num_blocks: int = 2
    num_micro_batches: int = 1
    in_backward: bool = False
    is_scaled: bool = False
    tells: bool = False


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


def _is_counted(frame) -> bool:
    """Whether a call is one of the package, and not made for the loop-back, on which nothing trains."""
    if not frame.f_code.co_filename.startswith(PACKAGE):
        return False
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith((PACKAGE, contextlib.__file__)):
        caller = caller.f_back
    return caller is None or caller.f_code.co_filename != loopback.__file__


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
        if event == "call" and self.where is None and _is_counted(frame):
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


class Checkpointed(Tower):
    """A tower whose blocks are checkpointed, as those of transformers can be."""

    gradient_checkpointing = True

    def __init__(self, *args):
        super().__init__(*args)
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = self._gradient_checkpointing_func(layer, hidden)
        return self.head(hidden)


@cache
def _tower(kind: type[Tower], num_blocks: int) -> Tower:
    torch.manual_seed(3)
    return kind(num_blocks)


def _model_of(world: World) -> Tower:
    return _tower(Checkpointed if world.settings.get("offload_activations") else Tower, world.num_blocks)


class Trial:
    """One rank's training."""

    def __init__(self, comm: LoopbackComm, world: World):
        self.rank = comm.rank
        self.world = world
        self.dtype = world.settings.get("compute_dtype", torch.float32)
        self.engine = build(copy.deepcopy(_model_of(world)), ZeroConfig(**world.settings), comm)
        place_and_divide_activations(self.engine, lambda _: comm)
        self.model = self.engine.model
        make = {"lr": 0.05, "weight_decay": 0.1}
        self.optimizer = hf_zero.ShardedOptimizer(self.engine, torch.optim.AdamW, **make)
        self.scaler = hf_zero.ZeroGradScaler("cpu", init_scale=2.0**8, enabled=world.is_scaled)
        self._loss: Tensor | None = None
        self._is_last = False

    def phases(self, step: int) -> Iterator[tuple[Phase, Tensor]]:
        """The parts of a step, each with the batch that it is about."""
        for micro_batch in range(self.world.num_micro_batches):
            self._is_last = micro_batch == self.world.num_micro_batches - 1
            batch = inputs(self.rank, step, salt=micro_batch).to(self.dtype)
            yield Phase.FORWARD, batch
            yield Phase.BACKWARD, batch
        for phase in (Phase.CLIP, Phase.STEP):
            yield phase, batch

    def do(self, phase: Phase, batch: Tensor) -> None:
        if phase is Phase.FORWARD:
            self._loss = self.scaler.scale(loss_of(self.model(batch).float()))
        elif phase is Phase.BACKWARD and self._loss is not None:
            loss, self._loss = self._loss, None
            is_told = self.world.tells and self._is_last
            with self.engine.reducing_this_backward(loss) if is_told else _nothing():
                with self.optimizer.in_backward() if self.world.in_backward else _nothing():
                    loss.backward()
        elif phase is Phase.CLIP and not self.world.in_backward:
            if self._scaled["stage"] is OptState.READY:  # else it was done before what raised
                self.scaler.unscale_(self.optimizer)
            self.optimizer.clip_grad_norm_(0.1)
        elif phase is Phase.STEP:
            if self._scaled["stage"] is not OptState.STEPPED:
                self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def _scaled(self) -> dict:
        """What the scaler knows of this step."""
        if not self.world.is_scaled:
            return {"stage": OptState.READY, "found_inf_per_device": {}}
        return self.scaler._per_optimizer_states[id(self.optimizer)]

    def step(self, step: int, has_batch: bool = True) -> None:
        for phase, batch in self.phases(step):
            if has_batch or phase in (Phase.CLIP, Phase.STEP):
                self.do(phase, batch)
        self.optimizer.zero_grad()

    def broken_step(self, step: int, breaks: Phase, policy: Policy, at: Break) -> None:
        for phase, batch in self.phases(step):
            try:
                with at.counting() if phase is breaks else _nothing():
                    self.do(phase, batch)
            except KeyboardInterrupt:
                if policy in (Policy.RETRY, Policy.SKIP):
                    break
                if policy is Policy.AGAIN:
                    self.do(phase, batch)
        self._loss = None
        self.optimizer.zero_grad()
        if self._scaled["found_inf_per_device"]:
            self.scaler.update()
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


def _outcome(comm: LoopbackComm, world: World, act: Callable[[Trial], None], at: Break) -> Outcome:
    try:
        trial = Trial(comm, world)
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


def _run(world: World, act: Callable[[LoopbackComm], Outcome], patience_seconds: float) -> list[Outcome]:
    _model_of(world)  # random numbers are one sequence for all threads

    def connected(comm: LoopbackComm) -> Outcome:
        comm.connect_parts(shard_size=world.shard_size)
        return act(comm)

    with mock.patch("tests.loopback.LoopbackComm", StepInTune):
        return run_loopback(world.num_ranks, connected, CPU, timeout_seconds=patience_seconds)


def unbroken(world: World, steps: tuple[int, ...], absent: tuple[int, int] | None = None) -> Tensor:
    """What a run over some batches ends with. `absent` is a rank and the step for which it has none."""

    def act(trial: Trial) -> None:
        for step in steps:
            trial.step(step, (trial.rank, step) != absent)

    first, *_ = _run(world, lambda comm: _outcome(comm, world, act, Break(None)), MUCH_PATIENCE_SECONDS)
    assert first.weights is not None, first.refusal
    return first.weights


def broken(
    world: World,
    breaks: Phase,
    policy: Policy,
    call: int | str | None,
    *,
    on: int | None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> tuple[list[Outcome], int]:
    """Makes one trial.

    Args:
        breaks, call: what breaks off, and at which call within it, see `Break`; None counts them.
        on: the rank; None for all.
        patience_seconds: how long a rank waits for the others.

    Returns:
        what came of it, by rank, and how many calls there were.
    """
    counts = [0] * world.num_ranks

    def play(comm: LoopbackComm) -> Outcome:
        at = Break(call if on in (None, comm.rank) else None)

        def act(trial: Trial) -> None:
            trial.step(0)
            trial.broken_step(1, breaks, policy, at)
            trial.step(2)

        outcome = _outcome(comm, world, act, at)
        counts[comm.rank] = at.num_calls
        return outcome

    return _run(world, play, patience_seconds), max(counts)
