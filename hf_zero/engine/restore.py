"""Turns an engine's model back into a plain one."""

from hf_zero.engine.access import forget
from hf_zero.engine.model_units import ModelUnits


def restore(engine: ModelUnits) -> None:
    """Takes everything off the model that the engine put onto it, and gives its parameters memory of their own. Each
    buffer is given up before the next is made whole."""
    while engine.handles:
        engine.handles.pop().remove()
    forget(engine.units)
    engine.bus.wait_for_jobs()
    engine.bus.synchronize()  # nothing reads what is given up
    for arena in engine.arenas:  # slots and gradients live on until their last user is done
        arena.close()
    engine.arenas = None
    engine.disk = None
    for unit in engine.units:
        unit.wait_for_all_gather()
        for flat in unit.flats:
            flat.restore_params(unit.name)
        unit.slot = unit.gradient_slots = unit.disk_prefetcher = None
        for gradient in unit.gradients:
            gradient.give_up()
    engine.registered.clear()
    engine.units.clear()
    engine.blocks.clear()
    engine.modules.clear()
    engine.schedule.stacks.clear()
