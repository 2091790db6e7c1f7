"""Updates of masters that rest on the host: unit by unit, on a thread (ZeRO-Offload, arXiv 2101.06840, section 4)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending, Transfer
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.unit import Unit
from hf_zero.errors import LifecycleError
from hf_zero.optim.finite import is_finite
from hf_zero.optim.flat_slices import FlatSlice


if TYPE_CHECKING:
    from hf_zero.storage import Swap


Gradients = dict[Unit, list[tuple[FlatSlice, Tensor]]]


class PartialStep:
    """One step of an optimizer, made in parts: each parameter is stepped once, and what a group counts goes up once.

    The parts are made by a shallow copy that shares the optimizer's state and has the groups' hyperparameters as they
    are now. So they may be made on another thread, while a scheduler sets those of the next step.

    Args:
        optimizer (`torch.optim.Optimizer`): any whose update of a parameter depends on no other one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        self._copy.param_groups = [dict(group) for group in self._groups]

    def step(self, params: Iterable[nn.Parameter], scale: torch.Tensor | None = None) -> None:
        """Steps these parameters.

        Args:
            params (iterable of `nn.Parameter`): with their gradients; those of other optimizers are left alone.
            scale (`Tensor`, *optional*): 0-d, by which a fused optimizer is to multiply the gradients on its way.
        """
        chosen = {id(param) for param in params}
        for group, before in zip(self._copy.param_groups, self._groups):
            group.clear()
            group.update(before, params=[param for param in before["params"] if id(param) in chosen])
        own = next((param for group in self._copy.param_groups for param in group["params"]), None)
        if own is None:
            return
        if scale is not None:  # its own attribute is a divisor
            self._copy.grad_scale, self._copy.found_inf = scale.reciprocal().to(own.device), None
        type(self._copy).step(self._copy)  # a scheduler may have put a step of its own before it

    @property
    def is_outdated(self) -> bool:
        """Whether somebody has set other hyperparameters since."""
        return any(
            group.get(key) is not value and key != "params" and bool(torch.as_tensor(group.get(key) != value).any())
            for group, before in zip(self.optimizer.param_groups, self._groups)
            for key, value in before.items()
        )

    def finish(self) -> None:
        """Lets the optimizer's groups count this step."""
        for group, before, after in zip(self.optimizer.param_groups, self._groups, self._copy.param_groups):
            counted = {key: value for key, value in after.items() if value is not before.get(key)}
            counted.pop("params", None)
            group.update(counted)
        self.optimizer._opt_called = True  # what schedulers look at, to warn of steps that were left out


class HostUpdate:
    """One optimizer step in parts. While one unit is updated, the compute copy of the one before is on its way up.

    Args:
        bus (`Bus`): whose thread does it.
        optimizers (iterable of `torch.optim.Optimizer`): those that step, with their hyperparameters as they are now.
        refreshes (`bool`): the compute copies follow at once.
        swap (`Swap`, *optional*): brings masters and state into memory, where they rest on disk.
    """

    def __init__(
        self,
        bus: Bus,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        refreshes: bool,
        swap: "Swap | None",
    ):
        self._bus = bus
        self._steps = [PartialStep(optimizer) for optimizer in optimizers]
        self.refreshes = refreshes
        self._swap = swap
        self.done: set[Unit] = set()
        self.is_over = False  # nothing more is to be updated
        self.is_finite = True  # False once a unit came whose gradient is not; on all ranks alike

    def post(self, unit: Unit, grads: list[tuple[FlatSlice, Tensor]], scale: Tensor | None) -> None:
        """Has a unit updated in its turn; `Bus.wait_for_jobs` waits for it.

        Args:
            unit (`Unit`): whose slices they are.
            grads (`list[tuple[FlatSlice, Tensor]]`): this rank's slices that have gradients, each with its own.
            scale (`Tensor`, *optional*): 0-d, by which the gradients are still to be multiplied.
        """
        self._bus.later(lambda: self.update(unit, grads, scale), lane="update")

    def update(self, unit: Unit, grads: list[tuple[FlatSlice, Tensor]], scale: Tensor | None = None) -> None:
        """Updates a unit now, see `post`."""
        for flat_slice, grad in grads:
            flat_slice.param.grad = grad.to(flat_slice.param.dtype)
        slices = [flat_slice for flat_slice, _ in grads]
        if self._swap is not None:
            self._update_in_turn(self._swap, slices, scale)
        else:
            self._step(slices, scale)
            for flat in unit.flats if self.refreshes else ():
                if flat.trainable:
                    flat.begin_refresh()
        self.done.add(unit)

    def _update_in_turn(self, swap: "Swap", slices: list[FlatSlice], scale: Tensor | None) -> None:
        for turn in swap.walk(slices, writes=True):
            self._step(turn.slices, scale)
            if self.refreshes:
                flat = turn.slices[0].flat
                first = flat.held[0]
                transfer = flat.refreshing = flat.send(turn.master, (first + turn.start, first + turn.stop))
                if isinstance(transfer, Transfer):
                    turn.uses.append(Pending(transfer.synchronize))

    def _step(self, slices: list[FlatSlice], scale: Tensor | None) -> None:
        for optimizer in self._steps:
            optimizer.step([flat_slice.param for flat_slice in slices], scale)
        for flat_slice in slices:
            flat_slice.param.grad = None

    @property
    def is_outdated(self) -> bool:
        """Whether somebody has set other hyperparameters since it was made."""
        return any(step.is_outdated for step in self._steps)

    def finish(self) -> None:
        """Ends the step, of which all units are updated: the optimizers' groups count it."""
        for optimizer in self._steps:
            optimizer.finish()


class HostSteps:
    """The steps of what rests on the host: within `step`, while a backward is still under way, or beside the next one.

    Args:
        engine (`ZeroEngine`): the sharded model.
        swap (`Swap`, *optional*): see `HostUpdate`.
    """

    def __init__(self, engine: ZeroEngine, swap: "Swap | None"):
        self._engine = engine
        self._swap = swap
        self._early: HostUpdate | None = None  # what the last backward has updated already
        self._late: HostUpdate | None = None  # what is updated beside the next forward and backward

    @property
    def is_spent(self) -> bool:
        """Whether the present gradients were applied while they came."""
        return self._early is not None

    @property
    def met_nonfinite(self) -> bool:
        """Whether the update in backward ended at gradients that are not finite."""
        return self._early is not None and not self._early.is_finite

    def begin(self, optimizers: list, grads: Gradients, scale: Tensor | None, *, is_late: bool) -> HostUpdate:
        """Has these units stepped, but for those that were updated in backward; `end` takes what it returns.

        Args:
            optimizers (`list[torch.optim.Optimizer]`): those that step.
            grads (`Gradients`): by unit its slices, each with its gradient.
            scale (`Tensor`, *optional*): 0-d, by which the gradients are still to be multiplied.
            is_late (`bool`): `end` does not wait for it, but the next `finish_update`.
        """
        if self._early is not None and self._early.is_outdated:
            raise LifecycleError(
                "optimizer: hyperparameters were set between a backward that updated (in_backward) and the step; set "
                "them before that backward or after the step"
            )
        update, self._early = self._early or self._update(optimizers, refreshes=not is_late), None
        for unit, own in grads.items():
            if unit not in update.done:
                update.post(unit, own, scale)
        return update

    def end(self, update: HostUpdate) -> None:
        """Waits for what was begun, or leaves it to go on beside the next forward and backward."""
        if update.refreshes:
            self._engine.wait_for_host()
            update.finish()
            return
        self._late = update
        for gradient in self._engine.gradients():
            gradient.hand_over()

    def finish_update(self) -> None:
        """Waits for an update that was made beside a forward and backward, and lets the compute copies follow."""
        if self._early is not None:
            self._engine.wait_for_host()
        late, self._late = self._late, None
        if late is not None:
            self._engine.wait_for_host()
            late.finish()
            self._engine.mark_updated(only_trained=True)
            self._engine.bus.synchronize()  # the masters may be written to from now on

    def abandon(self) -> None:
        """Ends a step whose gradients are dropped: units that were updated while they came stay so."""
        early, self._early = self._early, None
        if early is not None:
            early.is_over = True
            self._engine.wait_for_host()
            early.finish()
            self._engine.mark_updated(only_trained=True)

    @contextmanager
    def in_backward(self, optimizers: list, gradients_of: Callable[[list[Unit]], Gradients]) -> Iterator[None]:
        """See `ShardedOptimizer.in_backward`.

        Args:
            optimizers (`list[torch.optim.Optimizer]`): those that step.
            gradients_of (`Callable`): gives some units' slices with their gradients.
        """
        self.abandon()
        self._early = update = self._update(optimizers, refreshes=True)
        comm = self._engine.comm.side_group("update")
        self._engine.on_reduced = partial(self._post, update, comm, gradients_of)
        try:
            yield
        except BaseException:
            update.is_over = True  # the next forward, or `zero_grad`, on all ranks, clears up
            raise
        finally:
            self._engine.on_reduced = None

    def _post(self, update: HostUpdate, comm: Comm, gradients_of: Callable, unit: Unit) -> None:
        """Posts the update of a unit whose averaged gradient is on its way to the host."""
        bus = self._engine.bus
        if not unit.is_away or update.is_over:
            return  # `step` does it, or nobody
        for gradient in unit.gradients:
            gradient.is_spent = True

        def start():
            own = [used for gradient in unit.gradients for used in gradient.used]
            own += [not bus.has_failed, not update.is_over, self._takes(unit)]
            # also when something has failed here
            rows = comm.all_gather_vector(torch.tensor(own, dtype=torch.uint8), what="an update in backward")
            is_used = rows[:, :-3].amax(dim=0).all()  # else `step` does it, which cuts slices where need be
            update.is_finite = update.is_finite and bool(rows[:, -1].all())
            if is_used and rows[:, -3:].all() and update.is_finite:
                for gradient in unit.gradients:
                    gradient.used = [True] * len(gradient.used)
                update.update(unit, gradients_of([unit]).get(unit, []))

        # behind what has come down of this unit
        bus.later(lambda: bus.later(start, lane="update", always=True), always=True)

    def _takes(self, unit: Unit) -> bool:
        """Whether this rank's part of a unit's gradients is one to update by."""
        return self._engine.config.nonfinite == "ignore" or is_finite(unit)

    def _update(self, optimizers: list, *, refreshes: bool) -> HostUpdate:
        return HostUpdate(self._engine.bus, optimizers, refreshes=refreshes, swap=self._swap)
