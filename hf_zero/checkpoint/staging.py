"""Staged folders: all ranks write into a temporary folder, which is renamed when everything is on disk."""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import OpenFiles, Ranges, SafetensorsFile
from hf_zero.checkpoint.folders import STAGED_PREFIX, commit, make_folder, recover, sync_all, sync_path
from hf_zero.checkpoint.format import WeightFiles, crc_of_whole
from hf_zero.checkpoint.manifest import (
    CARD_NAME,
    OPTIMIZER_NAME,
    STATE_FOLDER,
    Checksums,
    Manifest,
    SavedRun,
    refuse_strangers,
    remove_manifest,
)
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, reraise, run_on_all_ranks
from hf_zero.comm.streams import Streams
from hf_zero.errors import CheckpointError, size_text


@dataclass(frozen=True)
class StagedFiles:
    """Safetensors files to save, and other files with them."""

    files: WeightFiles  # the same on all ranks, by path in the folder
    # this rank's (tensor name, first element, 1-D values). The pieces of all ranks cover all tensors. Every rank must
    # exhaust its iterator, which may call collectives
    pieces: Callable[[], Iterable[tuple[str, int, Tensor]]]
    write_beside: Callable[[Path], None] = lambda folder: None  # writes other files into the folder, on rank 0
    run: SavedRun | None = None  # set if the files are the state of a run


Move = Callable[[Path, Path, Manifest], None]


class Staged:
    """A temporary folder in which a checkpoint is written. Nothing appears under the final name before `publish`.

    The methods are collectives, and raise on all ranks if one fails. The temporary folder is then removed, and the
    destination is unchanged.

    Args:
        destination (`Path`): The final path.
        comm (`Comm`): The ranks. No other thread may use its connections.
        parts (`Sequence[StagedFiles]`): The files to write.
        move (`Callable`, *optional*): Moves the files into an existing destination; the temporary folder is then
            inside the destination. Rank 0 calls it with the temporary folder, the destination and the manifest of the
            new files, which it must write. By default, the temporary folder is next to the destination and is renamed
            to it.
    """

    def __init__(self, destination: Path, comm: Comm, parts: Sequence[StagedFiles], move: Move | None):
        self.comm = comm
        self.destination = destination
        self.parts = parts
        self.move = move
        self.root = (destination.parent if move is None else destination) / f"{STAGED_PREFIX}{destination.name}"
        self.path = self.root / destination.name  # the new files; it has the name of the destination
        self._ranges: list[list[Ranges]] = []  # written ranges by rank and part
        self._subject = f"saving to {destination}"

    @classmethod
    def open(
        cls, comm: Comm, destination: str | os.PathLike, parts: Sequence[StagedFiles], move: Move | None = None
    ) -> "Staged":
        """Creates the temporary folder with all safetensors files at full size and all other files. Creates missing
        parents of the destination."""
        staged = cls(Path(os.path.abspath(destination)), comm, parts, move)
        staged._on_first(staged._reserve)
        return staged

    def _reserve(self) -> None:
        parent = self.root.parent
        make_folder(parent)
        recover(parent)
        shutil.rmtree(self.root, ignore_errors=True)  # left over from an interrupted save
        if self.move is None:
            refuse_strangers(self.destination)
        nbytes, free_nbytes = sum(part.files.nbytes for part in self.parts), shutil.disk_usage(parent).free
        if free_nbytes < nbytes:
            raise CheckpointError(
                f"{self.destination}: saving takes {size_text(nbytes)}, but {size_text(free_nbytes)} are free; "
                "free space there or save to another folder"
            )
        self.path.mkdir(parents=True)
        for part in self.parts:
            for name, layout in part.files.layouts.items():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                SafetensorsFile.create(self.path / name, layout).close()
        for part in self.parts:
            part.write_beside(self.path)

    def write(self, parts: Sequence[StagedFiles]) -> None:
        """Writes the pieces of all ranks to disk. Raises [`CheckpointError`] if a write fails.

        Args:
            parts (`Sequence[StagedFiles]`): The parts passed to `open`, possibly with copied pieces.
        """

        def act() -> list[Ranges]:
            if not self.path.is_dir():
                raise _unshared(self.root.parent, self.comm.rank)
            return _write(self.path, parts)

        with self.or_discard():
            self._ranges = collect_from_all_ranks(self.comm, self._subject, act)

    def publish(self, after: Callable[[], None] | None = None) -> None:
        """Writes the manifest, flushes everything to disk, and renames the folder. Raises [`CheckpointError`] if some
        elements were not written.

        Args:
            after (`Callable`, *optional*): Called on rank 0 at the end.
        """

        def act() -> None:
            checksums: Checksums = {}
            for part, ranges in zip(self.parts, zip(*self._ranges)):
                checksums |= _checked(ranges, part.files, self._subject)
            run = next((part.run for part in self.parts if part.run is not None), None)
            manifest = Manifest.of_folder(self.path, checksums, run)
            if self.move is not None:
                sync_all(self.path)
                self.move(self.path, self.destination, manifest)
            else:
                refuse_strangers(self.destination)  # again, since files may have been added during the write
                manifest.write(self.path)
                commit(self.path, self.destination)
            if after is not None:
                after()

        self._on_first(act)
        self.discard()

    def discard(self) -> None:
        """Removes the temporary folder. Not a collective."""
        if self.comm.rank == 0:
            shutil.rmtree(self.root, ignore_errors=True)

    def _on_first(self, act: Callable[[], None]) -> None:
        with self.or_discard():
            run_on_all_ranks(self.comm, self._subject, on_first(self.comm, act))

    @contextmanager
    def or_discard(self) -> Iterator[None]:
        """Removes the temporary folder if the context raises."""
        try:
            yield
        except BaseException:
            self.discard()
            raise


def refuse_unshared(comm: Comm, folder: Path) -> None:
    """Raises [`CheckpointError`] on all ranks if a rank cannot see the files that rank 0 writes into `folder`, which
    must exist on rank 0. A collective."""
    if comm.num_ranks == 1:
        return
    subject = f"looking at {folder}"
    # a new name, since network file systems cache lookups
    probe = folder / comm.broadcast_object(f"_probe-{secrets.token_hex(8)}")
    run_on_all_ranks(comm, subject, on_first(comm, probe.touch))
    sees = collect_from_all_ranks(comm, subject, probe.exists)
    run_on_all_ranks(comm, subject, on_first(comm, lambda: probe.unlink(missing_ok=True)))
    if not all(sees):
        raise _unshared(folder, sees.index(False))


def _unshared(folder: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{folder}: rank {rank} does not see the files that rank 0 writes there; use a folder on storage that all "
        "hosts share"
    )


def connected(comm: Comm) -> Comm:
    """Returns the communicator for saves, after the background save has ended. Raises [`CheckpointError`] on all ranks
    if that save failed."""
    own = comm.side_group("files")
    if own.user is not None:
        own.user.wait()
    return own


def _write(folder: Path, parts: Sequence[StagedFiles]) -> list[Ranges]:
    """Writes this rank's pieces and flushes them to disk. Returns the written ranges by part."""
    failure: Exception | None = None
    written = []
    for part in parts:
        with OpenFiles(folder, part.files, writable=True) as opened:
            for tensor, start, values in part.pieces():
                if failure is None:
                    try:
                        opened.write_range(tensor, start, values)
                    except Exception as error:  # continue, since the iterator may call collectives
                        failure = error
            if failure is None:
                opened.sync()
            written.append(opened.ranges)
    reraise(failure)
    return written


def _checked(ranges: Sequence[Ranges], files: WeightFiles, subject: str) -> Checksums:
    """Combines the checksums of all ranks' ranges to those of the tensors. Raises if a range was not written."""
    checksums: Checksums = {name: {} for name in files.layouts}
    for tensor, name in files.file_of.items():
        found = [part for ranges_of_rank in ranges for part in ranges_of_rank.get(tensor, ())]
        expected, written = files.entry(tensor).nbytes, sum(part.nbytes for part in found)
        crc = crc_of_whole(found, expected)
        if crc is None:
            raise CheckpointError(
                f"{subject}: the ranks wrote {written} of the {expected} bytes of tensor {tensor!r}, so nothing was "
                "saved; this is a bug in hf_zero, please report it with the model and the number of ranks"
            )
        checksums[name][tensor] = crc
    return checksums


@contextmanager
def added(comm: Comm, folder: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder whose files are added to `folder`, which is created if it does not exist. A
    collective: any rank may write into it, and an error on one rank is raised on all."""
    staged = Staged.open(connected(comm), folder, [], move_into)
    with staged.or_discard():
        yield staged.path
    staged.publish()


def move_into(
    staged: Path,
    folder: Path,
    new: Manifest,
    *,
    replaces: Callable[[str], bool] = lambda name: False,
    is_weights: Callable[[str], bool] = lambda name: False,
) -> None:
    """Moves new files into a folder that may have others. The folder has no manifest meanwhile, so a mixture is never
    considered complete. At any time the folder has either the old or the new weights.

    transformers prefers a single file to an index. So a single file becomes effective when it is renamed; an index,
    when it is renamed or, if there was a single file, when that file is removed. Only if old and new shards have the
    same names must the old index be removed first: the folder then has no weights for a moment, instead of mixed ones.

    Args:
        staged (`Path`): The folder of the new files.
        folder (`Path`): The destination.
        new (`Manifest`): The manifest of the new files.
        replaces (`Callable`): Returns whether to remove an old file without a new one of its name.
        is_weights (`Callable`): Returns whether a file belongs to the weights.
    """
    try:
        before = Manifest.read(folder)
    except CheckpointError:  # a damaged manifest: list only the new files
        before = None
    remove_manifest(folder)
    names = sorted(str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file())
    names.sort(key=lambda name: (is_weights(name), name.endswith(".index.json")))  # an index last
    weights = [name for name in names if is_weights(name)]
    if len(weights) > 1 and any((folder / name).exists() for name in weights[:-1]):
        (folder / weights[-1]).unlink(missing_ok=True)
    for name in names:
        if name != CARD_NAME or not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / name, folder / name)
    for path in sorted((*folder.glob("*"), *folder.glob(f"{STATE_FOLDER}/**/*")), reverse=True):
        name = str(path.relative_to(folder))
        if path.is_dir() and replaces(f"{name}/"):
            with suppress(OSError):  # not empty
                path.rmdir()
        elif name not in names and replaces(name):
            path.unlink()
    for path in {folder / name for name in names}:
        sync_path(path.parent)
    left = {} if before is None else {name: found for name, found in before.files.items() if not replaces(name)}
    left_run = None if before is None or replaces(OPTIMIZER_NAME) else before.run
    Manifest(left | dict(new.files), new.run or left_run).write(folder)


_CHUNK_NBYTES = 64 * 2**20
_ALIGNMENT = 64


class Snapshots:
    """Copies of a rank's part of a checkpoint, in the dtypes of the files, for one checkpoint at a time.

    The memory is page-locked for pieces on an accelerator. It grows to the size of this rank's part of a checkpoint
    and is reused, since allocation would take longer than the copy. Several models may share one object: `take` waits
    for the save that still reads the memory.
    """

    def __init__(self):
        self.reader: threading.Thread | None = None  # writes the last copies
        self._chunks: list[Tensor] = []
        self._next = 0  # the current chunk
        self._used = 0  # bytes used in it

    def take(self, parts: Sequence[StagedFiles]) -> list[StagedFiles]:
        """Returns the same parts with copied pieces. Overwrites earlier copies."""
        if self.reader is not None:
            self.reader.join()  # not `Checkpoint.wait`, which the owner of that checkpoint calls to get its error
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
            # torch rounds page-locked memory up to a power of two, so use all of it
            size = max(1 << (nbytes - 1).bit_length(), _CHUNK_NBYTES) if pinned else max(nbytes, _CHUNK_NBYTES)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        place = self._chunks[self._next][self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return place
