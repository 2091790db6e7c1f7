"""Where a unit's parameters are, and which moves between those places exist."""

from enum import Enum

from hf_zero.errors import LifecycleError


class Phase(Enum):
    SHARDED = "sharded"  # only this rank's shard is held; parameters are placeholders
    GATHERING = "gathering"  # the collective is under way; parameters are placeholders
    GATHERED = "gathered"  # the whole values lie in the slot; parameters are placeholders
    ATTACHED = "attached"  # parameters are views of the slot


ALLOWED = {
    (Phase.SHARDED, Phase.GATHERING),
    (Phase.GATHERING, Phase.GATHERED),
    (Phase.GATHERED, Phase.ATTACHED),
    (Phase.ATTACHED, Phase.GATHERED),
    (Phase.GATHERED, Phase.SHARDED),
}


def moved(name: str, phase: Phase, new: Phase) -> Phase:
    """`new`, if a unit may go there from `phase`.

    Raises:
        `LifecycleError`: for a transition that does not exist.
    """
    if (phase, new) not in ALLOWED:
        raise LifecycleError(f"unit {name!r}: {phase.name} -> {new.name} is not allowed")
    return new
