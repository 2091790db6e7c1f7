"""Staged folders: all ranks write into a temporary folder, which is published when everything is on disk."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.folders import STAGED_PREFIX, commit, make_folder, recover, sync_all, sync_path
from hf_zero.checkpoint.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    STATE_FOLDER,
    WEIGHTS_SUFFIX,
    Checksums,
    Manifest,
    SavedRun,
    refuse_strangers,
)
from hf_zero.checkpoint.safetensors import OpenFiles, Ranges, WeightFiles, crc_of_whole, create_file, stem_of
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, reraise, run_on_all_ranks
from hf_zero.comm.streams import Streams
from hf_zero.engine import ZeroEngine
from hf_zero.engine.guards import refuse_torn
from hf_zero.errors import CheckpointError, size_text


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedFiles:
    """Safetensors files to save, and other files with them."""

    files: WeightFiles = WeightFiles.of({})  # the same on all ranks, by path in the folder
    # this rank's (tensor name, first element, 1-D values). The pieces of all ranks cover all tensors. Every rank must
    # exhaust its iterator, which may call collectives
    pieces: Callable[[], Iterable[tuple[str, int, Tensor]]] = tuple
    # writes other files into the folder. Every rank calls it before `pieces`, in any case: it may call collectives
    write_beside: Callable[[Path], object] = lambda folder: None
    run: SavedRun | None = None  # set if the files are the state of a run


class Checkpoint:
    """A checkpoint that is being saved. Between `begin` and `finish`, other files may be written into its `path`, a
    temporary folder.

    `begin` and `finish` are collectives, and raise on all ranks if one fails. The temporary folder is then removed,
    and the destination is unchanged.

    Args:
        comm (`Comm`): The ranks. No other thread may use its connections.
        folder (`str` or `os.PathLike`): The destination.
        parts (`Sequence[StagedFiles]`): The files to write.
        adds (`bool`): Add the files to the destination, which may have others; see `_move_into`. By default, the
            folder replaces the destination.
        check (`Callable`): Called on every rank first.
    """

    def __init__(
        self,
        comm: Comm,
        folder: str | os.PathLike,
        parts: Sequence[StagedFiles],
        adds: bool = False,
        check: Callable[[], None] = lambda: None,
    ):
        # a symbolic link is replaced by a checkpoint, and kept if files are added to its target
        self.folder = Path(os.path.realpath(folder) if adds else os.path.abspath(folder))
        self._comm = comm
        self._parts = parts
        self._adds = adds
        self._root = (self.folder if adds else self.folder.parent) / f"{STAGED_PREFIX}{self.folder.name}"
        self.path = self._root / self.folder.name  # all files but those that all ranks write
        self._tensors = self._root / f"tensors-{self.folder.name}"  # the others, moved into `path` at the end
        self._subject = f"saving to {self.folder}"
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

        def reserve() -> None:
            check()
            if comm.rank == 0:
                self._reserve()

        with self.or_discard():
            run_on_all_ranks(comm, self._subject, reserve)

    @classmethod
    def begin(
        cls, engine: ZeroEngine, folder: str | os.PathLike, *parts: StagedFiles | None, adds: bool = False
    ) -> "Checkpoint":
        """Checks the disk space, and creates the temporary folder with all safetensors files at full size."""
        engine.compare_before_save()
        given = [part for part in parts if part is not None]
        return cls(connected(engine.comm), folder, given, adds, partial(refuse_torn, engine))

    def _reserve(self) -> None:
        parent = self._root.parent
        make_folder(parent)
        recover(parent)
        shutil.rmtree(self._root, ignore_errors=True)  # left over from an interrupted save
        if not self._adds:
            refuse_strangers(self.folder)
        nbytes, free_nbytes = sum(part.files.nbytes for part in self._parts), shutil.disk_usage(parent).free
        if free_nbytes < nbytes:
            raise CheckpointError(
                f"{self.folder}: saving takes {size_text(nbytes)}, but {size_text(free_nbytes)} are free; free space "
                "there or save to another folder"
            )
        self.path.mkdir(parents=True)
        for part in self._parts:
            for name, layout in part.files.layouts.items():
                for base in (self._tensors, self.path):
                    (base / name).parent.mkdir(parents=True, exist_ok=True)
                create_file(self._tensors / name, layout)

    def _write_beside(self) -> None:
        failures = [_caught(partial(part.write_beside, self.path)) for part in self._parts]
        reraise(next(filter(None, failures), None))

    def finish(self, background: "Snapshots | None" = None, *, after: Callable[[], object] = lambda: None) -> None:
        """Writes all files and publishes the folder, the tensors with `background` in another thread. Rank 0 calls
        `after` when the folder is complete."""
        if background is None:
            self._write(after)
            return

        def copy() -> Sequence[StagedFiles]:
            failure = _caught(self._write_beside)
            copied = background.take(self._parts)  # in any case, since it may call collectives
            reraise(failure)
            return copied

        with self.or_discard():
            self._parts = run_on_all_ranks(self._comm, f"copying {self.folder}", copy)
        self._comm.user = self  # until the caller or the next save waits for it
        name = f"saving {self.folder.name}"
        self._thread = threading.Thread(target=self._write_in_background, args=(after,), name=name)
        background.reader = self._thread
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. Raises [`CheckpointError`] on all ranks if it could not be saved."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._comm.user = None
        failure, self._failure = self._failure, None
        reraise(failure)

    def _write_in_background(self, after: Callable[[], object]) -> None:
        try:
            self._write(after)
        except BaseException as error:
            logger.error("hf_zero: %s", error)  # log immediately; `wait` raises it
            self._failure = error

    def _write(self, after: Callable[[], object]) -> None:
        def publish() -> None:
            self._publish(of_ranks)
            after()

        with self.or_discard():
            of_ranks = collect_from_all_ranks(self._comm, self._subject, self._write_pieces)
            run_on_all_ranks(self._comm, self._subject, on_first(self._comm, publish))
        self.discard()

    def _write_pieces(self) -> list[Ranges]:
        """Writes this rank's pieces and flushes them to disk. Returns the written ranges by part."""
        failure = _caught(self._write_beside)
        written = []
        for part in self._parts:
            with OpenFiles(self._tensors, part.files, writable=True) as opened:
                for tensor, start, values in part.pieces():
                    if failure is None:  # otherwise continue, since the iterator may call collectives
                        failure = _caught(partial(opened.write_range, tensor, start, values))
                if failure is None:
                    opened.sync()
                written.append(opened.ranges)
        reraise(failure)
        return written

    def _publish(self, of_ranks: Sequence[Sequence[Ranges]]) -> None:
        """Writes the manifest, flushes everything to disk, and renames the folder or its files."""
        checksums: Checksums = {}
        for part, ranges in zip(self._parts, zip(*of_ranks)):
            checksums |= _checked(ranges, part.files, self._subject)
            for name in part.files.layouts:
                if (self.path / name).exists():
                    raise CheckpointError(
                        f"{name}: was written beside the checkpoint, which has a file of this name; use another name"
                    )
                os.rename(self._tensors / name, self.path / name)
        run = next((part.run for part in self._parts if part.run is not None), None)
        manifest = Manifest.of_folder(self.path, checksums, run)
        if self._adds:
            sync_all(self.path)
            _move_into(self.path, self.folder, manifest, {stem_of(name) for name in checksums})
        else:
            manifest.write(self.path)
            refuse_strangers(self.folder)  # again, since files may have been added during the write
            commit(self.path, self.folder)

    def discard(self) -> None:
        """Removes the temporary folder. Not a collective."""
        if self._comm.rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)
            if self._adds:
                with suppress(OSError):  # it has other files
                    self.folder.rmdir()

    @contextmanager
    def or_discard(self) -> Iterator[None]:
        """Removes the temporary folder if the context raises."""
        try:
            yield
        except BaseException:
            self.discard()
            raise


def _caught(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def connected(comm: Comm) -> Comm:
    """Returns the communicator for saves, after the background save has ended. Raises [`CheckpointError`] on all ranks
    if that save failed."""
    own = comm.side_group("files")
    if own.user is not None:
        own.user.wait()
    return own


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


def _move_into(staged: Path, folder: Path, new: Manifest, stems: set[str | None]) -> None:
    """Moves new files into a folder that may have others. If there are new weights, whose files have these stems, it
    removes the old files of the same stems and the optimizer's state of the old weights. The folder has no manifest
    meanwhile, so a mixture is never considered complete. At any time the folder has either the old or the new weights.

    transformers prefers a single file to an index. So a single file becomes effective when it is renamed; an index,
    when it is renamed or, if there was a single file, when that file is removed. Only if old and new shards have the
    same names must the old index be removed first: the folder then has no weights for a moment, instead of mixed ones.
    """

    def replaces(name: str) -> bool:
        return bool(stems) and (stem_of(name) in stems or name.startswith(f"{STATE_FOLDER}/"))

    before = None
    with suppress(CheckpointError):  # with a damaged manifest, list only the new files
        before = Manifest.read(folder)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)  # it is incomplete until the end
    names = sorted(str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file())
    names.sort(key=lambda name: (name.endswith((WEIGHTS_SUFFIX, ".index.json")), name.endswith(".index.json")))
    weights = [name for name in names if name.endswith((WEIGHTS_SUFFIX, ".index.json"))]
    if any((folder / name).exists() for name in weights[:-1]):
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
    Manifest(left | dict(new.files), None if before is None or stems else before.run).write(folder)


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
        """Returns copies of the parts' pieces, without `write_beside`. Overwrites earlier copies."""
        if self.reader is not None:
            self.reader.join()  # not `Checkpoint.wait`, which raises its error once
        self._next = self._used = 0
        taken, devices = [], set()
        for part in parts:
            pieces = []
            for name, start, values in part.pieces():
                copy = self._place(values.numel(), part.files.entry(name).dtype, pinned=values.device.type != "cpu")
                copy.copy_(values.detach(), non_blocking=True)
                devices.add(values.device)
                pieces.append((name, start, copy))
            taken.append(replace(part, pieces=partial(iter, pieces), write_beside=lambda folder: None))
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
