"""Saves on file systems that the ranks do not share: each copy of the folder receives the bytes that ranks elsewhere
have written.

Each rank has written its ranges to the files that it sees. The ranges are known to all, so groups and their ranges are
gone through in one order by all writers, and bytes travel in bounded pieces without further words.
"""

import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.checkpoint.files import PIECE_NBYTES, OpenFiles, Ranges
from hf_zero.checkpoint.format import RangeChecksum, WeightFiles
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, reraise, run_on_all_ranks
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class FilesystemGroups:
    """The ranks, grouped by the folder that they see."""

    members: tuple[tuple[int, ...], ...]  # of each group in rising order; the first is its writer
    comm: Comm

    @classmethod
    def find(cls, comm: Comm, folder: Path) -> "FilesystemGroups":
        """Finds out which ranks see what is written into `folder`, which exists on every rank. Collective."""
        if comm.num_ranks == 1:
            return cls(((0,),), comm)
        members, left = [], set(range(comm.num_ranks))
        token, subject = comm.broadcast_object(secrets.token_hex(8)), f"looking at {folder}"
        while left:
            writer = min(left)
            # Asked for by its name, which nobody has looked up before: a network file system lists folders late.
            probe = folder / f".probe-{token}-{writer}"
            run_on_all_ranks(comm, subject, probe.touch if comm.rank == writer else lambda: None)
            sees = collect_from_all_ranks(comm, subject, probe.exists)
            run_on_all_ranks(comm, subject, probe.unlink if comm.rank == writer else lambda: None)
            members.append(tuple(rank for rank in sorted(left) if sees[rank] or rank == writer))
            left.difference_update(members[-1])
        return cls(tuple(members), comm)

    @property
    def writers(self) -> list[int]:
        """One rank of each group."""
        return [ranks[0] for ranks in self.members]

    @property
    def is_writer(self) -> bool:
        return self.comm.rank in self.writers

    @property
    def is_one(self) -> bool:
        """Whether all ranks see the same folder."""
        return len(self.members) == 1

    def replicate_ranges(self, subject: str, folder: Path, files: WeightFiles, ranges: list[Ranges]) -> None:
        """Copies every range, by the writer of the group that has written it, to the files of every folder that lacks
        it. Collective."""
        failures: list[Exception] = []
        if self.is_writer:
            with OpenFiles(folder, files, writable=True) as opened:
                for source, tensor, part in self._written(ranges):
                    self._copy(opened, source, tensor, part, failures)
                with _noted(failures):
                    opened.sync()
        run_on_all_ranks(self.comm, subject, lambda: reraise(failures[0] if failures else None))

    def replicate_files(self, subject: str, folder: Path) -> None:
        """Copies small files to every folder that lacks them; what all have is not read. Collective."""

        def look() -> set[str]:
            found = folder.rglob("*") if self.is_writer else ()
            return {str(path.relative_to(folder)) for path in found if path.is_file()}

        names = collect_from_all_ranks(self.comm, subject, look)
        everywhere = set.intersection(*(names[rank] for rank in self.writers))
        own = names[self.comm.rank] - everywhere
        everyones = collect_from_all_ranks(
            self.comm, subject, lambda: {name: (folder / name).read_bytes() for name in own}
        )

        def write():
            content = {name: data for found in reversed(everyones) for name, data in found.items()}
            for name, data in content.items() if self.is_writer else ():
                path = folder / name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

        run_on_all_ranks(self.comm, subject, write)

    def _written(self, ranges: list[Ranges]) -> Iterator[tuple[int, str, RangeChecksum]]:
        """Yields (writer, tensor, range) of all ranges, in the same order on every rank."""
        for ranks in self.members:
            for rank in ranks:
                for tensor, parts in ranges[rank].items():
                    for part in parts:
                        yield ranks[0], tensor, part

    def _copy(
        self, opened: OpenFiles, source: int, tensor: str, part: RangeChecksum, failures: list[Exception]
    ) -> None:
        """Copies one range from the writer `source` to all others, in pieces."""
        bounce = torch.empty(min(part.nbytes, PIECE_NBYTES), dtype=torch.uint8)
        done = RangeChecksum(part.begin, 0, 0)
        while done.nbytes < part.nbytes:
            piece = bounce[: part.nbytes - done.nbytes]
            view = piece.numpy().data
            if self.comm.rank == source:
                with _noted(failures):
                    opened.file_of(tensor).read_bytes(tensor, done, view)
                for writer in self.writers:
                    if writer != source:
                        self.comm.send(piece, writer)
            else:
                self.comm.receive(piece, source)
                with _noted(failures):
                    opened.file_of(tensor).write_bytes(tensor, done, view)
            done = RangeChecksum(part.begin, done.nbytes + len(view), zlib.crc32(view, done.crc))
        if done.crc != part.crc and not failures:
            failures.append(CheckpointError(f"{opened.folder}: tensor {tensor!r} was damaged on its way; save again"))


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    """Records an error of this rank's disk. The exchange goes on, so that no other rank waits."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        failures.append(error)
