"""Groups of ranks that see the same folder: one shared file system, or a disk in every host, found by looking."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks


@dataclass(frozen=True)
class FilesystemGroups:
    """The ranks, grouped by the folder that they see.

    Args:
        members (`tuple[tuple[int, ...], ...]`): the ranks of each group in rising order; the first is its writer.
        rank (`int`): this one.
    """

    members: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def find(cls, comm: Comm, folder: Path) -> "FilesystemGroups":
        """Finds out which ranks see what is written into `folder`, which exists on every rank. Collective."""
        if comm.num_ranks == 1:
            return cls(((0,),), 0)
        members, left = [], set(range(comm.num_ranks))
        token, subject = comm.broadcast_object(secrets.token_hex(8)), f"looking at {folder}"
        while left:
            writer = min(left)
            # Asked for by its name, which nobody has looked up before: a network file system lists folders late.
            probe = folder / f".probe-{token}-{writer}"
            run_on_all_ranks(comm, subject, probe.touch if comm.rank == writer else _nothing)
            sees = collect_from_all_ranks(comm, subject, probe.exists)
            run_on_all_ranks(comm, subject, probe.unlink if comm.rank == writer else _nothing)
            members.append(tuple(rank for rank in sorted(left) if sees[rank] or rank == writer))
            left.difference_update(members[-1])
        return cls(tuple(members), comm.rank)

    @property
    def writers(self) -> list[int]:
        """One rank of each group."""
        return [ranks[0] for ranks in self.members]

    @property
    def is_writer(self) -> bool:
        return self.rank in self.writers

    @property
    def is_one(self) -> bool:
        """Whether all ranks see the same folder."""
        return len(self.members) == 1


def _nothing() -> None:
    pass
