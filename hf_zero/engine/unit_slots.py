"""Which slot the whole values of each unit appear in."""

import torch

from hf_zero.engine.flat import Flat
from hf_zero.engine.unit import Unit
from hf_zero.sharding.arena import Slot


def reassign_slots(units: list[Unit]) -> None:
    """Gives neighbours in a new order different slots, so that one can be gathered while the other is used.

    Autograd's views of the slots must be gone: it is called between steps.

    Args:
        units (`list[Unit]`): the blocks' units in their new order, none of them gathered.
    """
    units = [unit for unit in units if unit.slot is not None]
    slots = list({id(unit.slot): unit.slot for unit in units}.values())
    for unit in units:
        unit.evict()
    for slot in slots:
        if slot.holder is not None:
            slot.holder.evict()
        slot.holder = None
    for position, unit in enumerate(units):
        unit.slot = slots[position % len(slots)]
        bind_to_slot(unit.flats, unit.slot)


def slot_parts(flats: list[Flat]) -> list[tuple[int, torch.dtype]]:
    """Returns what a slot must hold for a unit with these buffers, see `Slot.views`."""
    return [flat.slot_part for flat in flats if flat.rest.whole is None]


def bind_to_slot(flats: list[Flat], slot: Slot) -> None:
    """Binds the buffers of a unit that need a slot to it, so that their whole values appear there."""
    moving = [flat for flat in flats if flat.rest.whole is None]
    for flat, full in zip(moving, slot.views(slot_parts(flats))):
        flat.bind(full)
