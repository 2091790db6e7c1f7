"""Where units collect their gradients: in memory of their own, or in slots that they share."""

from hf_zero.comm import Comm
from hf_zero.engine.gradient import GradientSlots
from hf_zero.engine.unit import Unit
from hf_zero.sharding.arena import ALIGN_NBYTES, Arena, Slot, parts_nbytes
from hf_zero.sharding.layout import align


def place_gradients(sharing: list[list[Unit]], comm: Comm, arena: Arena) -> None:
    """Gives memory for gradients to every trainable unit: memory of its own, or buffers that units share."""
    lent = []
    for group in sharing:
        own = [unit for unit in group if unit.gradients and not unit.gradients[0].is_persistent]
        lent.append({unit: parts_nbytes([g.flat.slot_part for g in unit.gradients]) for unit in own})
    blocks, vocabulary, root = (max(sizes.values(), default=0) for sizes in lent)
    if 2 * max(blocks, vocabulary) < 2 * blocks + vocabulary:  # less than with a buffer of their own
        lent = [lent[0] | lent[1], lent[2]]
    for sizes, count in zip(lent, (2, 1, 1)):
        nbytes, count = max(sizes.values(), default=0), min(len(sizes), count)
        idle = _slots_in_root(sharing[2][0], [*sizes], nbytes, count, comm, arena)
        slots = GradientSlots(nbytes, count, arena, idle)
        for unit in sizes:
            unit.gradient_slots = slots
    for gradient in (g for group in sharing for unit in group for g in unit.gradients if g.is_persistent):
        full = comm.shard_group.empty(gradient.flat.layout.full_numel, gradient.flat.dtype)
        gradient.lend(full, gradient.views_of(full))


def _slots_in_root(root: Unit, units: list[Unit], nbytes: int, count: int, comm: Comm, arena: Arena) -> list[Slot]:
    """Makes slots for the gradients of other units in the root's slot. There are none where it is too small, where an
    accelerator keeps all memory, where other ranks read gathered values, or with offload.

    Args:
        root (`Unit`): with its slot.
        units (`list[Unit]`): which collect gradients.
        nbytes, count (`int`): of the slots.
        comm (`Comm`): the data-parallel ranks.
        arena (`Arena`): where slots for gradients come from otherwise.
    """
    ranks, stride = comm.shard_group, align(nbytes, ALIGN_NBYTES)
    is_served = not ranks.reads_gathered and (not arena.keeps or ranks.shared_memory is not None)
    if root in units or root.slot is None or not root.is_trainable or not is_served:
        return []
    if not count or count * stride > root.slot.buffer.numel() or any(unit.is_away for unit in (root, *units)):
        return []
    return [Slot(root.slot.buffer[index * stride : index * stride + nbytes]) for index in range(count)]
