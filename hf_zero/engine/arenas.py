"""Where an engine's long-lived memory comes from, as far as it is not there from the start to the end."""

from functools import partial
from typing import NamedTuple

import torch

from hf_zero.comm import Comm
from hf_zero.sharding.arena import Arena


class Arenas(NamedTuple):
    """One for each purpose.

    Args:
        gathered (`Arena`): slots in which whole parameters appear.
        collected (`Arena`): slots in which backward collects gradients.
        reduced (`Arena`): gradients that are averaged over the ranks, between backward and step.
    """

    gathered: Arena
    collected: Arena
    reduced: Arena

    @classmethod
    def of(cls, comm: Comm) -> "Arenas":
        """Arenas on the ranks' device; gradients are collected where other ranks can read them."""
        if comm.shares_memory:  # what others have mapped stays
            make = partial(comm.empty, dtype=torch.uint8)
            collected = Arena("collected", comm.device, keeps=True, make=make)
        else:
            collected = Arena("collected", comm.device, keeps=not comm.is_on_cpu)
        gathered, reduced = (Arena(name, comm.device, keeps=not comm.is_on_cpu) for name in ("gathered", "reduced"))
        return cls(gathered, collected, reduced)
