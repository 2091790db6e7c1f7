"""A save on file systems that the ranks do not share: what one place has written goes to the writers of the others.

Each rank has written its ranges to the files that it sees. The ranges are known to all, so groups and their ranges are
gone through in one order by all writers, and bytes travel in bounded pieces without further words.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_zero.checkpoint.checksum import RangeChecksum
from hf_zero.checkpoint.filesystem_groups import FilesystemGroups
from hf_zero.checkpoint.open_files import OpenFiles, Ranges
from hf_zero.checkpoint.safetensors_file import PIECE_NBYTES
from hf_zero.checkpoint.weight_files import WeightFiles
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, reraise, run_on_all_ranks
from hf_zero.errors import CheckpointError


_FAILURES = (CheckpointError, OSError)  # of one rank's disk: the exchange goes on, so that no other rank waits


def replicate_ranges(
    comm: Comm,
    subject: str,
    groups: FilesystemGroups,
    folder: Path,
    files: WeightFiles,
    ranges: list[Ranges],
) -> None:
    """Brings every range into the files of every place. Collective.

    Args:
        comm (`Comm`): the ranks.
        subject (`str`): for messages.
        groups (`FilesystemGroups`): who sees which files.
        folder (`Path`): where they lie, seen by this rank.
        files (`WeightFiles`): what they hold.
        ranges (`list[Ranges]`): by rank, what was written.
    """
    failure: Exception | None = None
    if groups.is_writer:
        with OpenFiles(folder, files, writable=True) as opened:
            bounce = torch.empty(PIECE_NBYTES, dtype=torch.uint8)
            for ranks in groups.members:
                for tensor, part in _written_by(ranks, ranges):
                    try:
                        _copy(comm, groups, opened, tensor, part, source=ranks[0], bounce=bounce)
                    except _FAILURES as error:
                        failure = failure or error
            try:
                opened.sync()
            except _FAILURES as error:
                failure = failure or error
    run_on_all_ranks(comm, subject, lambda: reraise(failure))


def replicate_files(comm: Comm, subject: str, groups: FilesystemGroups, folder: Path, known: set[str]) -> None:
    """Gives every place the files that others have and it lacks. They are small. Collective.

    Args:
        comm (`Comm`): the ranks.
        subject (`str`): for messages.
        groups (`FilesystemGroups`): who sees which files.
        folder (`Path`): where they lie, seen by this rank.
        known (`set[str]`): files, relative to it, that all groups have already.
    """

    def read() -> dict[str, bytes]:
        paths = [path for path in folder.rglob("*") if path.is_file()] if groups.is_writer else []
        names = {str(path.relative_to(folder)): path for path in paths}
        return {name: path.read_bytes() for name, path in names.items() if name not in known}

    everyones = collect_from_all_ranks(comm, subject, read)

    def write():
        content = {name: data for found in reversed(everyones) for name, data in found.items()}
        for name, data in content.items() if groups.is_writer else ():
            path = folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    run_on_all_ranks(comm, subject, write)


def _written_by(ranks: tuple[int, ...], ranges: list[Ranges]) -> Iterator[tuple[str, RangeChecksum]]:
    for rank in ranks:
        for tensor, parts in ranges[rank].items():
            for part in parts:
                yield tensor, part


def _copy(
    comm: Comm,
    groups: FilesystemGroups,
    opened: OpenFiles,
    tensor: str,
    part: RangeChecksum,
    *,
    source: int,
    bounce: torch.Tensor,
) -> None:
    """Copies one range from the writer `source` to all others. A rank that fails goes on, so that the others can."""
    failure: Exception | None = None
    done = RangeChecksum(part.begin, 0, 0)
    while done.nbytes < part.nbytes:
        piece = bounce[: min(len(bounce), part.nbytes - done.nbytes)]
        view = piece.numpy().data
        try:
            if comm.rank == source:
                opened.read_bytes(tensor, part.begin + done.nbytes, view)
        except _FAILURES as error:
            failure = failure or error
        for writer in groups.writers:
            if comm.rank == source and writer != source:
                comm.send(piece, writer)
        if comm.rank != source:
            comm.receive(piece, source)
        try:
            if comm.rank != source and failure is None:
                opened.write_bytes(tensor, done, view)
        except _FAILURES as error:
            failure = error
        done = RangeChecksum(part.begin, done.nbytes + len(view), zlib.crc32(view, done.crc))
    if failure is None and done.crc != part.crc:
        failure = CheckpointError(f"{opened.folder}: tensor {tensor!r} was damaged on its way; save again")
    reraise(failure)
