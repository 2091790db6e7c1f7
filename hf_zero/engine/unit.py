"""The unit: parameters that are unsharded, resharded and reduced together."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Pending
from hf_zero.comm.base import DONE
from hf_zero.engine.flat import Flat
from hf_zero.engine.gradient import Gradient, GradientSlots
from hf_zero.engine.patch import Uncopyable
from hf_zero.sharding.slots import Slot


if TYPE_CHECKING:
    from hf_zero.storage import DiskPrefetcher


logger = logging.getLogger(__name__)


class Unit(Uncopyable):
    """The parameters of one block, or of the root.

    At stage 3 the unit is gathered into a slot that it shares with other units. The values in a slot stay valid until
    another unit is gathered into it or the values change, so using a unit again soon needs no communication. All ranks
    gather in the same order, so their slots hold the same units. `index`: position of the unit in a fixed order, the
    same on all ranks."""

    def __init__(self, name: str, flats: list[Flat], gradients: list[Gradient], *, index: int):
        self.name = name
        self.index = index
        self.flats = flats
        self.gradients = gradients
        self.is_trainable = bool(gradients)
        self.is_sharded = any(flat.is_sharded for flat in flats)
        # whether the optimizer updates it on the host
        self.is_offloaded = any(gradient.is_on_host for gradient in gradients)
        # whether its gradients are reduced in every backward: sharded gradients are, and gradients whose average has
        # more precision than the memory in which they are collected, where accumulating would round them
        self.reduces_each_backward = any(not gradient.is_reduced_once for gradient in gradients)
        self.is_here = not self.is_sharded  # the gathered values are in the slot, or their gather has begun
        self.is_unsharded = not self.is_sharded  # parameters are views of the values; else they are placeholders
        self.slot: Slot | None = None  # holds the gathered values; None if they stay in place
        self.gradient_slots: GradientSlots | None = None  # None if all gradient buffers are persistent
        self.disk_prefetcher: DiskPrefetcher | None = None  # reads values that are stored on disk
        self.finish_updates: Callable[[], None] = lambda: None  # see `ZeroEngine.finish_updates`
        self.note_torn: Callable[[str], None] = lambda what: None  # see `guards.note_torn`
        self.is_embedding = False  # a token embedding, whose backward needs no values
        self.num_gathered = 0  # how many `gathered` contexts hold the parameters
        self.keeps_writes = not self.is_sharded  # whether writes to the parameters take effect now
        self._all_gathers: list[Pending] = []
        self._gradient_slot: Slot | None = None
        self._was_unsharded = False  # when the first `gathered` context was entered
        # the buffers' `full` outside of `gathered` contexts; empty outside of them
        self._outer_fulls: list[Tensor] = []

    @property
    def slot_parts(self) -> list[tuple[int, torch.dtype]]:
        """The memory that this unit needs in a slot, see `Slot.views`. Values that are used in place need none."""
        return [flat.slot_part for flat in self.flats if flat.whole is None]

    def use_slot(self, slot: Slot) -> None:
        """Sets the slot into which values are gathered, except those that are used in place."""
        self.slot = slot
        moving = [flat for flat in self.flats if flat.whole is None]
        for flat, full in zip(moving, slot.views(self.slot_parts)):
            flat.bind(full)

    def all_gather(self) -> None:
        """Starts gathering the values into the slot, unless they are there or their gather has begun."""
        if self.is_here:
            return
        self.evict()  # waits for gathers that an exception interrupted
        self._take_slot()
        self._begin_all_gather()

    def prefetch_from_disk(self) -> None:
        """Starts reading the values from disk for the next all-gather of this unit."""
        if self.disk_prefetcher is not None and not self.is_here:
            self.disk_prefetcher.prefetch()

    def _begin_all_gather(self, *, exact: bool = False) -> None:
        arriving = self.disk_prefetcher.load() if self.disk_prefetcher is not None else None
        for flat in self.flats:
            self._all_gathers.append(flat.all_gather(self.name, arriving, exact=exact))
        self.is_here = True  # only now that all have begun: an interrupted attempt is repeated

    def _take_slot(self) -> None:
        if self.slot is not None:
            if self.slot.holder not in (None, self):
                self.slot.holder.evict()
            self.slot.holder = self

    def wait_for_all_gather(self) -> None:
        """Waits for pending all-gathers, also for those of an attempt that an exception interrupted."""
        for pending in self._all_gathers:
            pending.wait()
        self._all_gathers = []

    def unshard(self) -> None:
        """Waits for the all-gather, which must have begun, and makes the parameters views of the gathered values."""
        if self.is_unsharded:
            return
        assert self.is_here, f"unit {self.name!r} is gathered before it is unsharded"
        self.wait_for_all_gather()
        self._show(True)

    def reshard(self) -> None:
        """Replaces the parameters by placeholders. The slot keeps the values until another unit needs it."""
        if self.is_sharded and self.is_unsharded and not self.num_gathered:
            self._show(False)

    def _show(self, whole: bool) -> None:
        """Switches all parameters to gathered values or to placeholders. If that raises, all are switched back."""
        show, undo = (Flat.unshard, Flat.reshard) if whole else (Flat.reshard, Flat.unshard)
        try:
            for flat in self.flats:
                show(flat)
        except BaseException:
            for flat in self.flats:
                undo(flat)
            raise
        self.is_unsharded = whole

    def evict(self) -> None:
        """Drops the slot's contents, because another unit takes the slot or the values have changed."""
        if self.num_gathered:
            return  # its values are in separate memory
        self.wait_for_all_gather()
        if self.is_sharded and self.is_here:
            self.reshard()
            self.is_here = False
            for flat in self.flats:
                flat.outdate_views()

    def refresh(self, only_trained: bool, only_used: bool) -> list[Pending]:
        """Updates the compute copies from the masters. Sharded values are gathered at their next use, others now.

        Args:
            only_trained: Frozen parameters did not change.
            only_used: Parameters without a gradient did not change.
        """
        flats = [flat for flat in self.flats if flat.trainable or not only_trained]
        used = {gradient.flat: gradient.used for gradient in self.gradients if only_used}
        for flat in flats:
            flat.outdate_forwards(used.get(flat, [True] * len(flat.params)))
        for flat in flats:
            if not only_trained:
                flat.refreshing = None  # a pending refresh has old values
            flat.refresh().wait()
        if self.is_sharded and flats:
            self.evict()
        return [flat.all_gather(self.name) for flat in flats if not flat.is_sharded]

    @property
    def has_late(self) -> bool:
        """Whether gradients have arrived after those of this backward were reduced."""
        return any(gradient.is_reduced and any(gradient.filled) for gradient in self.gradients)

    def lend_gradients(self) -> None:
        """Acquires memory for collecting gradients, unless the unit has it."""
        if self.gradients and self.gradients[0].full is None:
            slot = self._gradient_slot = self.gradient_slots.acquire()
            fulls = slot.views([gradient.flat.slot_part for gradient in self.gradients])
            for gradient, full in zip(self.gradients, fulls):
                gradient.lend(full)

    def begin_gathered(self, writeback: bool) -> None:
        """Gathers the parameters exactly into memory outside of the slots, until `end_gathered`. With `writeback`,
        writes to them are kept."""
        if not self.num_gathered and self.is_sharded:
            self._gather_apart()
        self.num_gathered += 1
        self.keeps_writes = self.keeps_writes or writeback

    def _gather_apart(self) -> None:
        self._was_unsharded = self.is_unsharded
        if not self._was_unsharded:
            self._leave_slot()
        elif any(flat.packing is not None for flat in self.flats):
            # the rounded values stay in the slot for the forward that uses them
            for flat in self.flats:
                flat.reshard()
            self.is_here = self.is_unsharded = False
        # Separate memory, because autograd may hold views of the slot from a forward.
        self._outer_fulls = [flat.full for flat in self.flats]
        try:
            for flat, full in zip(self.flats, self._outer_fulls):
                flat.bind(full.clone() if self.is_unsharded else torch.empty_like(full))
            if self.is_unsharded:
                for flat in self.flats:
                    flat.unshard()
            else:
                self._begin_all_gather(exact=True)
                self.unshard()
        except BaseException:
            self._give_up_gathered()
            raise

    def _give_up_gathered(self) -> None:
        """Restores the unit after a `begin_gathered` that raised. The next all-gather waits for pending ones, see
        `evict`."""
        for flat, full in zip(self.flats, self._outer_fulls):
            flat.bind(full)
            flat.unshard() if self._was_unsharded else flat.reshard()
        self.is_here = self.is_unsharded = self._was_unsharded
        self._outer_fulls = []

    def fill_slot(self) -> None:
        """Copies the values inside `gathered` also into the slot, which autograd's views from an earlier forward
        read."""
        if self._outer_fulls and self.slot is not None and self.slot.holder is not self:
            self._take_slot()
            self._copy_to(self._outer_fulls)

    def end_gathered(self, writeback: bool) -> None:
        """Ends a `begin_gathered`. With `writeback`, all ranks use rank 0's values."""
        try:
            for flat in self.flats if writeback else ():
                flat.write_back()
        except BaseException:
            self.note_torn("hf_zero.gathered(writeback=True)")
            raise
        finally:
            self._end_gathered(writeback)

    def _end_gathered(self, writeback: bool) -> None:
        self.num_gathered -= 1
        if not self.num_gathered:
            if not self.keeps_writes:
                self._warn_dropped()
            self._return_to_slot()
            self.keeps_writes = not self.is_sharded
            for flat in self.flats if writeback or self.is_sharded else ():
                flat.mark_clean()

    def _warn_dropped(self) -> None:
        for flat in self.flats:
            index = next(flat.assigned(), None)
            # assigned data is visible on all ranks, while `changed` checks only the rank's own range
            is_reported = index is None or flat.comm.rank == 0
            index = flat.changed() if index is None else index
            if index is not None and is_reported:
                logger.warning(
                    "hf_zero: %s was written inside hf_zero.gathered without writeback=True; stage 3 drops the write",
                    flat.infos[index].name,
                )
                return

    def _return_to_slot(self) -> None:
        if not self._outer_fulls:
            return
        fulls, self._outer_fulls = self._outer_fulls, []
        # unsharded when the context was entered, and its slot not reused since: its forward or backward reshards it
        stays = self._was_unsharded and (self.slot is None or self.slot.holder is self)
        if stays:
            self._copy_to(fulls)
        for flat, full in zip(self.flats, fulls):
            flat.bind(full)
            if stays:
                flat.unshard()
        if not stays:
            self._leave_slot()

    def _copy_to(self, fulls: list[Tensor]) -> None:
        for flat, full in zip(self.flats, fulls):
            if full is not flat.whole:  # values used in place are the masters
                full.copy_(flat.full)
                if flat.packing is not None:
                    flat.packing.round_(full)  # as a gather does

    def _leave_slot(self) -> None:
        self.evict()
        if self.slot is not None and self.slot.holder is self:
            self.slot.holder = None

    def sum_gradients_locally(self) -> None:
        """Keeps the collected gradients on this rank, instead of reducing those that every backward reduces."""
        for gradient in self.gradients:
            if not gradient.is_reduced_once:
                gradient.sum_locally()

    def reduce_gradients(self, then: Callable[[], None] = lambda: None, *, at_step: bool = False) -> Pending:
        """Averages the collected gradients over the ranks. All ranks call it for the same units in the same order.

        Args:
            then (`Callable`): Called when the copies to the host have been issued.
            at_step (`bool`): Whether to reduce the gradients that are reduced once per step, after the last
                micro-batch, and those that were held back, instead of those that every backward reduces.
        """
        if not self.gradients:
            return DONE
        self.lend_gradients()
        if at_step:
            chosen = [gradient for gradient in self.gradients if gradient.is_due_at_step]
        else:
            chosen = [gradient for gradient in self.gradients if not gradient.is_reduced_once]
        leave_at_once = all(gradient.leaves_at_once(adds=gradient.is_reduced) for gradient in chosen)
        pendings = [gradient.reduce(self.name) for gradient in chosen]
        if leave_at_once:
            then()

        def finish():
            for pending in pendings:
                pending.wait()
            if not leave_at_once:
                then()

        slot, self._gradient_slot = self._gradient_slot, None
        reducing = Pending(finish, once=True)
        if slot is not None:
            self.gradient_slots.reducing(slot, reducing)
        return reducing

    def drop_gradients(self, sums_locally: bool) -> None:
        """Drops the gradients of this step after a backward or a reduction raised. So that all ranks reduce alike,
        those that were already reduced once in this step become zero, and so do those that are summed locally, or
        that this backward would have summed (`sums_locally`)."""
        for gradient in self.gradients:
            was_reduced = gradient.is_reduced and gradient.is_reduced_once
            was_summed = gradient.local_sum is not None or (sums_locally and not gradient.is_reduced_once)
            gradient.clear()
            if was_reduced:
                gradient.become_zero()
            if was_summed:
                gradient.sum_locally()
            if not gradient.flat.placement.collects_whole:
                gradient.full, gradient.views = None, []
        if self._gradient_slot is not None:
            self.gradient_slots.release(self._gradient_slot)
            self._gradient_slot = None
