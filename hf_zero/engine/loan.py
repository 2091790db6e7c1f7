"""Gradients in slots whose values nobody needs any more before the optimizer step changes them: averages that are
taken last, and in the root's slot what the blocks collect."""

import torch
from torch import Tensor

from hf_zero.engine.gradient import GradientInArena, GradientSlots
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.unit import Phase, Unit, bind_to_slot
from hf_zero.sharding.arena import ALIGN_NBYTES, Arena
from hf_zero.sharding.layout import align


class Loan:
    """The holder of a slot whose memory averages take, until a unit needs it again.

    Args:
        parts (`list[Tensor]`): of the slot's memory, which are lent.
        arena (`Arena`): to which, and from which averages are taken.
        gradients (`list[GradientInArena]`): those whose averages may come to rest there.
    """

    def __init__(self, parts: list[Tensor], arena: Arena, gradients: list[GradientInArena]):
        self._parts = parts
        self._arena = arena
        self._gradients = gradients

    def evict(self) -> None:
        """Ends the loan. Averages that still rest there, since no step has come, move to memory of their own."""
        for part in self._parts:
            self._arena.take_back(part)
        for gradient in self._gradients:
            for part in self._parts:
                gradient.leave(part)


class RootLoan:
    """The holder of the root's slot while blocks collect their gradients there: from the moment in a step's last
    backward when nobody needs the root's values any more, until the blocks' gradients are reduced.

    A root with a tied embedding is as large as several blocks, and after the head's backward only the embedding's is
    to come, which needs no values.

    [Note: who holds the values] A backward reads values that it has saved: the parameter, or a view of the slot. So
    each parameter, and the slot's memory, must be held as often as when the model had just been sharded, and no more.

    Args:
        engine (`ModelUnits`): whose root it is.
        slots (`GradientSlots`): of the blocks, with idle ones in the root's slot.
    """

    def __init__(self, engine: ModelUnits, slots: GradientSlots):
        self.is_wanted = True  # until a block's backward is found to compute again, or to have moved, what it needs
        self.is_under_way = False
        self._engine = engine
        self._root = engine.root
        self._slots = slots
        # what lies behind these slots is for averages, if the root's own then fits in their place
        buffer, end = engine.root.slot.buffer, sum(align(slots.nbytes, ALIGN_NBYTES) for _ in slots.idle)
        own = sum(gradient.flat.rest.masters.numel * gradient.dtype.itemsize for gradient in engine.root.gradients)
        self._front, self._behind = (buffer[:end], buffer[end:]) if own <= end < len(buffer) else (buffer, None)
        self._is_elsewhere = False  # the root was needed again after all, and has other memory in this backward
        for unit in engine.blocks:
            for slot in slots.idle if unit.gradient_slots is slots else ():
                unit.gradient_views(slot)
        self._holders = self._count_holders()

    @classmethod
    def of(cls, engine: ModelUnits) -> "RootLoan | None":
        """Makes the loan of an engine whose blocks have slots in the root's, unless a block uses parameters of it."""
        used = {id(param) for module in engine.modules.values() for param in module.parameters()}
        used &= {id(param) for flat in engine.root.flats for param in flat.params}
        slots = next((u.gradient_slots for u in engine.blocks if u.gradient_slots and u.gradient_slots.idle), None)
        return None if slots is None or used else cls(engine, slots)

    def try_to_begin(self) -> None:
        """Lends the slot, unless somebody holds what lies there."""
        root = self._root
        if self.is_under_way or not self.is_wanted or root.num_gathered or root.phase is not Phase.UNSHARDED:
            return
        root.reshard()
        if self._count_holders() != self._holders:
            root.unshard()
            return
        self.is_under_way = True
        root.evict()
        root.slot.holder = self
        self._slots.uses_idle = True
        if self._behind is not None:
            self._engine.arenas.reduced.lend(self._behind)

    def _count_holders(self) -> list[int]:
        """Counts who holds each parameter, and the slot's memory, while the parameters show placeholders."""
        storage = self._root.slot.buffer.untyped_storage()
        params = [param for flat in self._root.flats for param in flat.params]
        return [torch._C._storage_Use_Count(storage._cdata), *(param._use_count() for param in params)]

    def evict(self) -> None:
        """Lets the root's values appear in other memory, when they are needed before the loan has ended."""
        self._is_elsewhere = True
        for flat in self._root.flats:
            flat.bind(torch.empty_like(flat.full))

    def end(self) -> None:
        """Ends the loan, when no gradient there is used any more. Does nothing when none is under way."""
        if self.is_under_way:
            self._slots.uses_idle = False
            self._root.evict()
            self._root.slot.holder = None
            if self._behind is not None:
                self._engine.arenas.reduced.take_back(self._behind)
            if self._is_elsewhere:
                bind_to_slot(self._root.flats, self._root.slot)
                self._is_elsewhere = False
            self.is_under_way = False  # last: what broke off is done again

    def break_off(self, in_backward: bool) -> None:
        """Ends the loan after an exception. In a step's last backward the slot's contents are dropped in any case: so
        they are on a rank that has lent it, and on one where that backward has ended."""
        self.end()
        if in_backward and self._engine.schedule.is_last_backward:
            self._root.evict()

    def pass_on(self) -> None:
        """Ends the loan, and lends the memory to averages that are still to come in this step."""
        self.end()
        arena = self._engine.arenas.reduced
        parts = [part for part in (self._front, self._behind) if part is not None]
        self._root.slot.holder = Loan(parts, arena, _averages(self._engine))
        arena.lend(self._front)


def saves_plainly() -> bool:
    """Whether autograd saves what backward needs as it is, and does not compute it again or have it moved."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def lend_slots(engine: ModelUnits) -> None:
    """Lends slots to averages that are still to come in this step. What the step does not change stays. An arena that
    keeps its memory has room for all averages anyway.

    Args:
        engine (`ModelUnits`): whose backward has no use for values any more.
    """
    arena = engine.arenas.reduced
    gradients = _averages(engine)
    # the root's slot last: a block's average leaves it to the root's
    slots = {id(unit.slot): unit.slot for unit in reversed(engine.units) if unit.slot is not None}
    for slot in slots.values() if gradients and not arena.keeps else ():
        holder = slot.holder
        if isinstance(holder, RootLoan) or (isinstance(holder, Unit) and not holder.is_trainable):
            continue
        if holder is not None:
            holder.evict()
        slot.holder = Loan([slot.buffer], arena, gradients)
        arena.lend(slot.buffer)  # when whoever takes the slot would end the loan


def _averages(engine: ModelUnits) -> list[GradientInArena]:
    """Returns the gradients whose averages rest in an arena."""
    return [gradient for gradient in engine.gradients() if isinstance(gradient, GradientInArena)]
