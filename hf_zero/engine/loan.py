"""Slots as memory for averages, between the last gather of a backward and the step."""

from hf_zero.engine.gradient import GradientInArena
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.unit import Unit
from hf_zero.sharding.arena import Arena, Slot


class Loan:
    """The holder of a slot whose memory averages take, until a unit needs it again."""

    def __init__(self, slot: Slot, arena: Arena, gradients: list[GradientInArena]):
        self._slot = slot
        self._arena = arena
        self._gradients = gradients

    def evict(self) -> None:
        """Ends the loan. Averages that still rest there, since no step has come, move to memory of their own."""
        self._arena.take_back(self._slot.buffer)
        for gradient in self._gradients:
            gradient.leave(self._slot.buffer)


def lend_slots(engine: ModelUnits) -> None:
    """Lends the slots to averages that are still to come in this step. What the step does not change stays. An arena
    that keeps its memory has room for all averages anyway."""
    arena = engine.arenas.reduced
    gradients = [gradient for gradient in engine.gradients() if isinstance(gradient, GradientInArena)]
    # the root's slot last: a block's average leaves it to the root's
    units = [unit for unit in [*engine.blocks, engine.root] if unit.slot is not None]
    slots = {id(unit.slot): unit.slot for unit in units}
    for slot in slots.values() if gradients and not arena.keeps else ():
        holder = slot.holder
        if isinstance(holder, Unit) and not holder.is_trainable:
            continue
        if holder is not None:
            holder.evict()
        slot.holder = Loan(slot, arena, gradients)
        arena.lend(slot.buffer)  # when whoever takes the slot would end the loan
