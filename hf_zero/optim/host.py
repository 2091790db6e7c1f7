"""Updates of offloaded master weights: unit by unit, on a host thread (ZeRO-Offload, arXiv 2101.06840, section 4)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending, Transfer
from hf_zero.engine import guards
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.unit import Unit
from hf_zero.errors import LifecycleError
from hf_zero.optim.flat_slices import FlatSlice
from hf_zero.optim.gradients import is_finite
from hf_zero.optim.partial_step import PartialStep, lent
from hf_zero.storage import Swap


IN_BACKWARD = "an update in backward"  # marks the model as inconsistent until a complete step has been taken

Gradients = dict[Unit, list[tuple[FlatSlice, Tensor]]]  # for each unit, the slices with gradients, and the gradients


class When(Enum):
    """When an optimizer step updates offloaded units."""

    BACKWARD = "as soon as their gradients are available, concurrently with backward"
    STEP = "in the step"


class HostUpdate:
    """One optimizer step, executed in parts. While one unit is updated, the compute copy of the previous unit is
    copied to the device. `swap` reads masters and state from disk.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], when: When, swap: Swap | None):
        self.steps = [PartialStep(optimizer) for optimizer in optimizers]
        self.when = when
        self._swap = swap
        self.done: set[Unit] = set()
        self.is_over = False  # no further units are updated
        self.has_failed = False  # during the update of a unit, or before it
        self.is_finite = True  # False after a unit with a non-finite gradient on any rank; the same on all ranks

    def update(self, unit: Unit, grads: list[tuple[FlatSlice, Tensor]], scale: Tensor | None = None) -> None:
        """Updates a unit.

        Args:
            grads (`list`): this rank's slices that have gradients, with the gradients.
            scale (`Tensor`, *optional*): 0-d, a factor to apply to the gradients.
        """
        if self._swap is not None:
            self._update_on_disk(self._swap, dict(grads), scale)
        else:
            self._step(grads, scale)
            for flat in unit.flats:
                if flat.trainable:
                    flat.begin_refresh()
        self.done.add(unit)

    def _update_on_disk(self, swap: Swap, grads: dict[FlatSlice, Tensor], scale: Tensor | None) -> None:
        for turn in swap.walk(list(grads), writes=True):
            self._step([(flat_slice, grads[flat_slice]) for flat_slice in turn.slices], scale)
            flat = turn.slices[0].flat
            start, stop = turn.window
            covers = flat.masters.covers[0] + start, flat.masters.covers[0] + stop
            transfer = flat.refreshing = flat.send(turn.master, covers)
            if isinstance(transfer, Transfer):
                turn.uses.append(Pending(transfer.synchronize))

    def _step(self, grads: Iterable[tuple[FlatSlice, Tensor]], scale: Tensor | None) -> None:
        with lent(grads) as params:
            for step in self.steps:
                step.step(params, scale)

    def finish(self) -> None:
        """Completes the step after all units are updated, and adds it to the groups' step counts."""
        for step in self.steps:
            step.finish()


class HostSteps:
    """The steps of offloaded units."""

    def __init__(self, engine: ZeroEngine, swap: Swap | None):
        self._engine = engine
        self._swap = swap
        self._update: HostUpdate | None = None  # started in a backward; None after its step

    @property
    def is_spent(self) -> bool:
        """Whether the current gradients were applied in backward."""
        return self._update is not None and self._update.when is When.BACKWARD

    @property
    def met_nonfinite(self) -> bool:
        """Whether the update in backward has stopped at non-finite gradients."""
        return self.is_spent and not self._update.is_finite

    def refuse_outdated(self) -> None:
        """Raises [`LifecycleError`] if hyperparameters were changed between an update in backward and the step."""
        if self.is_spent and any(step.is_outdated for step in self._update.steps):
            raise LifecycleError(
                "optimizer: hyperparameters were changed between a backward with in_backward and the step; change "
                "them before that backward or after the step"
            )

    def begin(self, optimizers: list, grads: Gradients, scale: Tensor | None) -> HostUpdate:
        """Starts the update of units that were not updated in backward. Pass the result to `end`. `scale` is a 0-d
        factor to apply to the gradients."""
        update, self._update = self._update, None
        update = update or HostUpdate(optimizers, When.STEP, self._swap)
        for unit, own in grads.items():
            if unit not in update.done:
                self._engine.bus.later(partial(update.update, unit, own, scale), lane="update")
        return update

    def end(self, update: HostUpdate) -> None:
        """Waits for the update started by `begin`."""
        self._engine.wait_for_host()
        update.finish()

    def finish_update(self) -> None:
        """Waits for an update in backward that is in progress."""
        if self.is_spent:
            update = self._update
            try:
                self._engine.wait_for_host()
            finally:
                self._note_broken(update)

    def abandon(self) -> None:
        """Ends a step whose gradients are dropped. Units that were updated in backward stay updated, as do those that
        are still queued; which ones depends on timing."""
        if self.is_spent:
            early, self._update = self._update, None
            try:
                self._engine.wait_for_host()
            finally:
                self._note_broken(early)
                early.is_over = True
            with guards.noting_torn(self._engine, "an optimizer step"):
                early.finish()
                self._engine.mark_updated(only_trained=True)

    def _note_broken(self, update: HostUpdate) -> None:
        """Marks the model as inconsistent if an update in backward has updated only some of the units."""
        trained = {unit for unit in self._engine.units if unit.is_trainable}  # `step` updates those on the device
        if update.has_failed or (update.done and update.done != trained):
            guards.note_torn(self._engine, IN_BACKWARD)

    @contextmanager
    def in_backward(self, optimizers: list, gradients_of: Callable[[list[Unit]], Gradients]) -> Iterator[None]:
        """Updates units in backward, see `ShardedOptimizer.in_backward`. `gradients_of` returns the slices of some
        units with their gradients."""
        self.abandon()
        self._update = update = HostUpdate(optimizers, When.BACKWARD, self._swap)
        comm = self._engine.comm.side_group("update")
        self._engine.on_reduced = partial(self._post, update, comm, gradients_of)
        try:
            yield
        except BaseException:
            update.is_over = True  # `zero_grad` on all ranks cleans up, or the next forward does
            raise
        finally:
            self._engine.on_reduced = None

    def _post(self, update: HostUpdate, comm: Comm, gradients_of: Callable, unit: Unit) -> None:
        """Queues the update of a unit whose averaged gradient is being copied to the host."""
        bus = self._engine.bus
        if not unit.is_offloaded or update.is_over:
            return  # updated by `step`, or not at all
        for gradient in unit.gradients:
            gradient.is_spent = True

        def start():
            is_taken = self._engine.config.nonfinite == "ignore" or is_finite(unit)
            own = [used for gradient in unit.gradients for used in gradient.used]
            own += [not bus.has_failed, not update.is_over, is_taken]
            # exchanged even if this rank has failed
            rows = comm.all_gather_vector(torch.tensor(own, dtype=torch.uint8), what="an update in backward")
            is_used = rows[:, :-3].amax(dim=0).all()  # otherwise `step` updates it, and splits slices if necessary
            update.is_finite = update.is_finite and bool(rows[:, -1].all())
            if is_used and rows[:, -3:].all() and update.is_finite:
                for gradient in unit.gradients:
                    gradient.used = [True] * len(gradient.used)
                update.has_failed = True  # reset at the end
                update.update(unit, gradients_of([unit]).get(unit, []))
                update.has_failed = False

        # after the unit's gradients have arrived
        bus.later(lambda: bus.later(start, lane="update", always=True), always=True)
