"""New files are written by all ranks under a temporary name, and get their names when everything is on disk."""

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
    """The safetensors files of one folder that is saved, and what lies beside them."""

    files: WeightFiles  # the same on all ranks, by path in the folder
    # this rank's (tensor name, first element, 1-D values); the ranks' together tile all tensors. All ranks take all of
    # them, so that collectives may be between them
    pieces: Callable[[], Iterable[tuple[str, int, Tensor]]]
    write_beside: Callable[[Path], None] = lambda folder: None  # small files, into the folder; rank 0 calls it
    run: SavedRun | None = None  # where the files are a run's state


Move = Callable[[Path, Path, Manifest], None]


class Staged:
    """A temporary folder in which a checkpoint is written. Nothing appears under the final name before `publish`.

    Every method is collective, and raises on all ranks when it fails on one; the temporary folder is then removed, and
    the destination is as before.

    Args:
        destination (`Path`): the final path.
        comm (`Comm`): the ranks. Its connections are used by no other thread meanwhile.
        parts (`Sequence[StagedFiles]`): all that the ranks write.
        move (`Callable`, *optional*): moves the files into a destination that holds others, in which the temporary
            folder then lies. Rank 0 calls it with the temporary folder, the destination and the manifest of the new
            files, which it has to write. By default the temporary folder lies beside the destination and takes its
            name.
    """

    def __init__(self, destination: Path, comm: Comm, parts: Sequence[StagedFiles], move: Move | None):
        self.comm = comm
        self.destination = destination
        self.parts = parts
        self.move = move
        self.root = (destination.parent if move is None else destination) / f"{STAGED_PREFIX}{destination.name}"
        self.path = self.root / destination.name  # in which the files grow: it has the name of the destination
        self._ranges: list[list[Ranges]] = []  # that were written, by rank and by part
        self._subject = f"saving to {destination}"

    @classmethod
    def open(
        cls, comm: Comm, destination: str | os.PathLike, parts: Sequence[StagedFiles], move: Move | None = None
    ) -> "Staged":
        """Makes the temporary folder with all safetensors files at their full size, and the small files beside them.
        Missing parents of the destination are created."""
        staged = cls(Path(os.path.abspath(destination)), comm, parts, move)
        staged._on_first(staged._reserve)
        return staged

    def _reserve(self) -> None:
        parent = self.root.parent
        make_folder(parent)
        recover(parent)
        shutil.rmtree(self.root, ignore_errors=True)  # of a save that was killed
        if self.move is None:
            refuse_strangers(self.destination)
        nbytes, free_nbytes = sum(part.files.nbytes for part in self.parts), shutil.disk_usage(parent).free
        if free_nbytes < nbytes:
            raise CheckpointError(
                f"{self.destination}: saving takes {size_text(nbytes)}, {size_text(free_nbytes)} are free; "
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
        """Writes all ranks' pieces to disk. Raises [`CheckpointError`] where the system refused a write.

        Args:
            parts (`Sequence[StagedFiles]`): those that were given, possibly with copies of the pieces.
        """

        def act() -> list[Ranges]:
            if not self.path.is_dir():
                raise _unshared(self.root.parent, self.comm.rank)
            return _write(self.path, parts)

        with self.or_discard():
            self._ranges = collect_from_all_ranks(self.comm, self._subject, act)

    def publish(self, after: Callable[[], None] | None = None) -> None:
        """Writes the manifest, flushes everything to disk, and gives the folder its name. Raises [`CheckpointError`]
        where no rank has written some elements.

        Args:
            after (`Callable`, *optional*): called by rank 0 at the end.
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
                refuse_strangers(self.destination)  # again: files may have come while it was written
                manifest.write(self.path)
                commit(self.path, self.destination)
            if after is not None:
                after()

        self._on_first(act)
        self.discard()

    def discard(self) -> None:
        """Removes the temporary folder. It is not collective."""
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
        raise _unshared(folder, sees.index(False))


def _unshared(folder: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{folder}: rank {rank} does not see the files that rank 0 writes there; give a folder on storage that all "
        "hosts share"
    )


def connected(comm: Comm) -> Comm:
    """Returns the ranks over the connections of saves, after the save in the background has ended. Raises
    [`CheckpointError`], on all ranks, where that save failed."""
    own = comm.side_group("files")
    if own.user is not None:
        own.user.wait()
    return own


def _write(folder: Path, parts: Sequence[StagedFiles]) -> list[Ranges]:
    """Writes this rank's pieces, flushed to disk. Returns the ranges of each tensor that it wrote, by part."""
    failure: Exception | None = None
    written = []
    for part in parts:
        with OpenFiles(folder, part.files, writable=True) as opened:
            for tensor, start, values in part.pieces():
                if failure is None:
                    try:
                        opened.write_range(tensor, start, values)
                    except Exception as error:  # the pieces go on: other ranks may have a part in making them
                        failure = error
            if failure is None:
                opened.sync()
            written.append(opened.ranges)
    reraise(failure)
    return written


def _checked(ranges: Sequence[Ranges], files: WeightFiles, subject: str) -> Checksums:
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
def added(comm: Comm, folder: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary folder whose small files are added to `folder`, which is made where it is missing. Collective:
    any rank may write into it, and an error on one rank is raised on all."""
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
    """Moves new files into a folder that may hold others, without a manifest meanwhile, so that a mixture is never
    taken for complete. At any moment the folder holds either the old weights or the new.

    transformers takes a single file before an index. So a single file switches the folder over by its own rename, and
    an index does so by its rename or, after a single file, by that file's removal. Only where the names of old and new
    parts coincide must the old index go first: for that moment the folder has no weights, rather than mixed ones.

    Args:
        replaces (`Callable`): whether a file of a former save goes, unless a new one has its name.
        is_weights (`Callable`): whether a file belongs to the weights.
    """
    try:
        before = Manifest.read(folder)
    except CheckpointError:  # whatever was wrong there: the new files are known
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
            with suppress(OSError):  # it is not empty
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
