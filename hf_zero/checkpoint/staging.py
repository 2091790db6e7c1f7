"""New files are written by all ranks under a temporary name, and get their names when everything is on disk."""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import OpenFiles, Ranges, SafetensorsFile
from hf_zero.checkpoint.folders import (
    STAGED_PREFIX,
    make_folder,
    make_staged,
    remove_left_over,
    remove_replaced,
    sync_all,
    sync_path,
    take_name,
)
from hf_zero.checkpoint.format import WeightFiles, crc_of_whole
from hf_zero.checkpoint.table import CARD_NAME, TABLE_NAME, Checksums, ChecksumTable, refuse_strangers
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.comm.streams import Streams
from hf_zero.errors import CheckpointError, size_text


@dataclass(frozen=True)
class StagedFiles:
    """The safetensors files of one folder that is saved, and what lies beside them."""

    files: WeightFiles  # the same on all ranks
    # this rank's (tensor name, first element, 1-D values); the ranks' together tile all tensors. All ranks take all of
    # them, so that collectives may be between them
    pieces: Callable[[], Iterable[tuple[str, int, Tensor]]]
    write_beside: Callable[[Path], None]  # small files, into the folder; rank 0 calls it
    subfolder: str = ""  # where the safetensors files lie, relative to the destination


class Staged:
    """A temporary folder in which a checkpoint is written. Nothing appears under the final name before `publish`.

    Every method is collective, and raises on all ranks when it fails on one; what was staged is then gone, what was
    there before is untouched.

    Args:
        root (`Path`): the temporary folder, which all ranks see. What is saved grows in `path`, a folder of the
            destination's name in it.
        comm (`Comm`): the ranks. Its connections are used by no other thread meanwhile.
    """

    def __init__(self, destination: Path, root: Path, comm: Comm):
        self.comm = comm
        self.destination = destination
        self.root = root
        self.path = root / destination.name
        self._checksums: Checksums = {}  # of the safetensors files that were written, by their paths in `path`
        self._lock: int | None = None  # marks `root` as in use, on rank 0 until the end
        self._subject = f"saving to {destination}"

    @classmethod
    def open(
        cls, comm: Comm, destination: str | os.PathLike, parts: Sequence[StagedFiles], *, inside: bool = False
    ) -> "Staged":
        """Makes the temporary folder with all safetensors files at their full size, and the small files beside them.
        It lies beside the destination, whose missing parents are created, or `inside` it for a save that adds to
        it."""
        destination = Path(os.path.abspath(destination))
        parent = destination if inside else destination.parent
        run_on_all_ranks(comm, f"saving to {destination}", on_first(comm, lambda: make_folder(parent)))
        refuse_unshared(comm, parent)
        root = parent / comm.broadcast_object(f"{STAGED_PREFIX}{secrets.token_hex(4)}")
        staged = cls(destination, root, comm)
        staged._on_first(lambda: staged._reserve(parts))
        return staged

    def _reserve(self, parts: Sequence[StagedFiles]) -> None:
        parent = self.root.parent
        remove_left_over(parent)
        if self.destination != parent:
            refuse_strangers(self.destination)
        nbytes, free_nbytes = sum(part.files.nbytes for part in parts), shutil.disk_usage(parent).free
        if free_nbytes < nbytes:
            raise CheckpointError(
                f"{self.destination}: saving takes {size_text(nbytes)}, {size_text(free_nbytes)} are free; "
                "free space there or save to another folder"
            )
        self._lock = make_staged(self.root)
        for part in parts:
            folder = self.path / part.subfolder
            folder.mkdir(parents=True, exist_ok=True)
            for name, layout in part.files.layouts.items():
                SafetensorsFile.create(folder / name, layout).close()
        self.path.mkdir(exist_ok=True)
        for part in parts:
            part.write_beside(self.path)

    def write(self, parts: Sequence[StagedFiles]) -> None:
        """Writes all ranks' pieces to disk. Raises [`CheckpointError`] where the system refused a write, or nobody
        wrote some elements."""
        with self.or_discard():
            for part in parts:
                folder = self.path / part.subfolder
                ranges = collect_from_all_ranks(self.comm, self._subject, partial(_write, folder, part))
                check = partial(_checked, ranges, part.files, self._subject)
                for name, crcs in run_on_all_ranks(self.comm, self._subject, check).items():
                    self._checksums[os.path.join(part.subfolder, name)] = crcs

    def publish(self, publish: Callable[[Path], None] | None = None, after: Callable[[], None] | None = None) -> None:
        """Writes the table of checksums, flushes everything to disk, and renames the folder.

        Args:
            publish (`Callable`, *optional*): called by rank 0 with the temporary folder. By default that takes the
                destination's name, and the folder that it replaces is removed when this is on disk.
            after (`Callable`, *optional*): called by rank 0 at the end.
        """

        def act():
            ChecksumTable.of_folder(self.path, self._checksums).write(self.path)
            sync_all(self.path)
            if publish is None:  # again: files may have come while it was written
                refuse_strangers(self.destination)
            (publish or partial(take_name, destination=self.destination))(self.path)
            sync_path(self.root.parent)

        self._on_first(act)
        if publish is None:
            self._on_first(lambda: remove_replaced(self.destination))
        if after is not None:
            self._on_first(after)
        self.discard()

    def discard(self) -> None:
        """Removes the temporary folder. It is not collective."""
        if self._lock is not None:
            os.close(self._lock)  # first: network file systems keep files that are open
            self._lock = None
        if self.comm.rank == 0:
            shutil.rmtree(self.root, ignore_errors=True)

    def _on_first(self, act: Callable[[], None]) -> None:
        with self.or_discard():
            run_on_all_ranks(self.comm, self._subject, on_first(self.comm, act))

    @contextmanager
    def or_discard(self) -> Iterator[None]:
        """Removes the temporary folder where the context does not come to its end."""
        try:
            yield
        except BaseException:
            self.discard()
            raise


def refuse_unshared(comm: Comm, folder: Path) -> None:
    """Raises [`CheckpointError`], on all ranks, if a rank does not see the files that rank 0 writes into `folder`,
    which exists for rank 0. Collective."""
    if comm.num_ranks == 1:
        return
    subject = f"looking at {folder}"
    # a name that nobody has looked up before: network file systems list folders late
    probe = folder / comm.broadcast_object(f"_probe-{secrets.token_hex(8)}")
    run_on_all_ranks(comm, subject, on_first(comm, probe.touch))
    sees = collect_from_all_ranks(comm, subject, probe.exists)
    run_on_all_ranks(comm, subject, on_first(comm, lambda: probe.unlink(missing_ok=True)))
    if not all(sees):
        raise CheckpointError(
            f"{folder}: rank {sees.index(False)} does not see the files that rank 0 writes there; give a folder on "
            "storage that all hosts share"
        )


def connected(comm: Comm) -> Comm:
    """Returns the ranks over the connections of saves, after the save in the background has ended. Raises
    [`CheckpointError`], on all ranks, where that save failed."""
    own = comm.side_group("files")
    if own.user is not None:
        own.user.wait()
    return own


def _write(folder: Path, part: StagedFiles) -> Ranges:
    """Writes this rank's part of the bytes, flushed to disk, and returns the ranges that it wrote of each tensor."""
    failure: Exception | None = None
    with OpenFiles(folder, part.files, writable=True) as opened:
        for tensor, start, values in part.pieces():
            if failure is None:
                try:
                    opened.write_range(tensor, start, values)
                except Exception as error:  # the pieces go on: other ranks may have a part in making them
                    failure = error
        if failure is not None:
            raise failure
        opened.sync()
        return opened.ranges


def _checked(ranges: list[Ranges], files: WeightFiles, subject: str) -> Checksums:
    """Returns the checksums of all tensors from those of all ranks' ranges, and refuses a range that no rank has
    written."""
    checksums: Checksums = {name: {} for name in files.layouts}
    for tensor, name in files.file_of.items():
        found = [part for ranges_of_rank in ranges for part in ranges_of_rank.get(tensor, ())]
        expected, written = files.entry(tensor).nbytes, sum(part.nbytes for part in found)
        crc = crc_of_whole(found, expected)
        if crc is None:
            raise CheckpointError(
                f"{subject}: the ranks wrote {written} of the {expected} bytes of tensor {tensor!r}, nothing was "
                "saved; this is a fault of hf_zero, please report it with the model and the number of ranks"
            )
        checksums[name][tensor] = crc
    return checksums


@contextmanager
def inside(staged: Path, folder: Path, *, replaces: Callable[[str], bool]) -> Iterator[None]:
    """Removes the checksums of a folder while files move into it, so that a mixture is not taken for damage, and
    writes those of all its files afterwards. `replaces` says of a file of a former save whether it goes now."""
    new = ChecksumTable.read(staged)
    assert new is not None, f"{staged} has no table"
    try:
        before = ChecksumTable.read(folder) or ChecksumTable()
    except CheckpointError:  # whatever was wrong there: what is saved now is known
        before = ChecksumTable()
    (folder / TABLE_NAME).unlink(missing_ok=True)
    yield
    before.replaced(new, gone=filter(replaces, before.files)).write(folder)


def move_into(source: Path, target: Path) -> None:
    """Moves a file, or every file below a folder, into a folder that may hold others."""
    if not source.is_dir():
        os.replace(source, target)
        return
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        move_into(path, target / path.name)


@contextmanager
def added(comm: Comm, folder: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary folder whose small files are added to `folder`, which is made where it is missing, with their
    checksums at the end. Collective: any rank may write into it, and an error on one rank is raised on all."""
    staged = Staged.open(connected(comm), folder, [], inside=True)
    with staged.or_discard():
        yield staged.path
    staged.publish(lambda path: _add(path, staged.destination))


def _add(staged: Path, folder: Path) -> None:
    with inside(staged, folder, replaces=lambda name: False):
        for path in staged.iterdir():
            is_kept = path.name == CARD_NAME and (folder / path.name).exists()
            if path.name != TABLE_NAME and not is_kept:
                move_into(path, folder / path.name)


_CHUNK_NBYTES = 64 * 2**20
_ALIGNMENT = 64


class Snapshots:
    """Copies pieces of checkpoints, in the dtypes of their files, one checkpoint at a time.

    The memory is page-locked where pieces lie on an accelerator. It grows to the size of this rank's part of a
    checkpoint, and stays: fresh memory would cost more time than the copy. Several models may share one object: `take`
    waits until the save that still reads the memory has ended.
    """

    def __init__(self):
        self.reader: threading.Thread | None = None  # writes what was taken last
        self._chunks: list[Tensor] = []
        self._next = 0  # the chunk that is being filled
        self._used = 0  # bytes of it

    def take(self, parts: Sequence[StagedFiles]) -> list[StagedFiles]:
        """Returns the same parts with their pieces copied. What was taken before is overwritten."""
        if self.reader is not None:
            self.reader.join()  # not `Checkpoint.wait`: a failure is raised where that checkpoint is waited for
        self._next = self._used = 0
        taken, devices = [], set()
        for part in parts:
            pieces = []
            for name, start, values in part.pieces():
                copy = self._place(values.numel(), part.files.entry(name).dtype, pinned=values.device.type != "cpu")
                copy.copy_(values.detach(), non_blocking=True)
                devices.add(values.device)
                pieces.append((name, start, copy))
            taken.append(replace(part, pieces=partial(iter, pieces)))
        for device in devices:
            Streams(device).synchronize()
        return taken

    def _place(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        nbytes = numel * dtype.itemsize
        while self._next < len(self._chunks) and self._used + nbytes > len(self._chunks[self._next]):
            self._next, self._used = self._next + 1, 0
        if self._next == len(self._chunks):
            # a power of two, to which torch rounds page-locked memory up: what follows finds its room there
            size = max(1 << (nbytes - 1).bit_length(), _CHUNK_NBYTES) if pinned else max(nbytes, _CHUNK_NBYTES)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        place = self._chunks[self._next][self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return place
