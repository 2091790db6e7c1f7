"""The file in which the tensors of one rank rest. It is read and written without the page cache where the system
allows it, in pieces, by a few threads: io_uring was no faster, see `docs/design.md`."""

import errno
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.comm import Comm, Counters, Pending
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.errors import StorageError, size_text


logger = logging.getLogger(__name__)

PAGE_NBYTES = 4096  # direct access wants offsets, lengths and addresses that are multiples of a disk's sector
PIECE_NBYTES = 8 * 2**20
NUM_THREADS = 4
PROBE_NBYTES = 64 * 2**20
SLOW_NBYTES_PER_S = 500e6  # what the slowest disks on a PCI or SATA bus do; others turn, or are behind a network

READ, WRITE = "disk read", "disk write"
_CALLS = {READ: lambda *where: os.preadv(*where), WRITE: lambda *where: os.pwritev(*where)}
_VERBS = {READ: "reading", WRITE: "writing"}


def in_pages(nbytes: int) -> int:
    """Rounds `nbytes` up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True)
class _Operation:
    """A read or write under way."""

    way: str
    start: int
    stop: int
    pieces: list[Future]

    @property
    def is_done(self) -> bool:
        return all(piece.done() for piece in self.pieces)

    def conflicts(self, way: str, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop and WRITE in (way, self.way)


class SwapFile:
    """A file without a name, of which nothing is left however the process ends. It is made by `open`.

    What is asked for later finds what was written before: a read or write waits for those under way that it meets.
    When the disk refuses a read or write, everything that is asked of the file from then on raises. It counts "disk
    read" and "disk write" bytes.

    `where` is the folder and the rank, for messages. The descriptors are for ordinary and for direct access, `None`
    where the file system has none; this object owns them.
    """

    def __init__(self, where: str, folder: Path, descriptors: tuple[int, int | None], counters: Counters):
        self.where = where
        self.folder = folder
        self.nbytes = 0  # reserved so far
        self._plain, direct = descriptors
        self._descriptor = self._plain if direct is None else direct
        self._counters = counters
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hf_zero-disk")
        self._lock = threading.Lock()
        self._under_way: list[_Operation] = []
        self._failure: StorageError | None = None
        self.readers: weakref.WeakSet = weakref.WeakSet()  # each has `written`, called before what it has read changes
        opened = [descriptor for descriptor in descriptors if descriptor is not None]
        self._close = weakref.finalize(self, _close, self._threads, opened)

    @classmethod
    def open(cls, comm: Comm, folder: str | os.PathLike) -> "SwapFile":
        """Makes each rank's file in a folder, which ranks and hosts may share. Collective. Raises [`StorageError`] on
        all ranks, when one finds no such folder or may not write there."""
        folder = Path(os.path.abspath(folder))
        subject = f"offload_dir {folder}"
        descriptors = run_on_all_ranks(comm, subject, lambda: _opened(folder, subject, comm.rank), StorageError)
        return cls(f"{subject} (rank {comm.rank})", folder, descriptors, comm.counters)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go without the page cache."""
        return self._descriptor != self._plain

    def reserve(self, comm: Comm, nbytes: int) -> int:
        """Reserves room at the end of the file, filled with zeros, so that a full disk is noticed now, and returns
        where it begins. It has so many bytes on this rank, rounded up to whole pages. Collective. Raises
        [`StorageError`] on all ranks, when there is no room for what one needs."""
        start, nbytes = self.nbytes, in_pages(nbytes)
        run_on_all_ranks(comm, self.where, lambda: self._allocate(start, nbytes), StorageError)
        self.nbytes = start + nbytes
        return start

    def _allocate(self, start: int, nbytes: int) -> None:
        free_nbytes = shutil.disk_usage(self.folder).free
        try:
            if nbytes > free_nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._plain, start, nbytes)
            else:
                os.ftruncate(self._plain, start + nbytes)
        except OSError as error:
            os.ftruncate(self._plain, start)
            raise StorageError(
                f"{self.where}: {size_text(nbytes)} more are needed there and {size_text(free_nbytes)} are free "
                f"({error.strerror}); free space, give another offload_dir, or use more ranks"
            ) from error

    def read(self, offset: int, memory: Tensor) -> Pending:
        """Fills `memory`, contiguous whole pages of the host's, with what lies at `offset`, a multiple of a page. The
        `wait` of what it returns raises [`StorageError`] when the disk has refused."""
        return self._move(READ, offset, memory)

    def write(self, offset: int, memory: Tensor) -> Pending:
        """Writes `memory`, which must not change until the result was waited for; see `read`."""
        return self._move(WRITE, offset, memory)

    def _move(self, way: str, offset: int, memory: Tensor) -> Pending:
        view = memory.view(torch.uint8).numpy().data
        stop = offset + len(view)
        assert not any(number % PAGE_NBYTES for number in (offset, len(view), memory.data_ptr())), "not whole pages"
        assert stop <= self.nbytes, f"bytes [{offset}, {stop}) of {self.nbytes}"
        for reader in list(self.readers) if way == WRITE else ():
            reader.written(offset, stop)
        self._wait_for_conflicts(way, offset, stop)
        self._refuse_failed()
        pieces = [
            self._threads.submit(self._transfer, way, view[first : first + PIECE_NBYTES], offset + first)
            for first in range(0, len(view), PIECE_NBYTES)
        ]
        operation = _Operation(way, offset, stop, pieces)
        with self._lock:
            self._under_way = [each for each in self._under_way if not each.is_done] + [operation]
            self._counters.add(way, len(view))
        return Pending(lambda: self._finish(operation))

    def _wait_for_conflicts(self, way: str, start: int, stop: int) -> None:
        """Waits for operations under way in this range that must end first."""
        with self._lock:
            before = [operation for operation in self._under_way if operation.conflicts(way, start, stop)]
        for operation in before:
            self._finish(operation)

    def _finish(self, operation: _Operation) -> None:
        for piece in operation.pieces:
            piece.result()
        self._refuse_failed()

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _transfer(self, way: str, view: memoryview, offset: int) -> None:
        """Moves one piece, on a thread. The first failure is kept, and nothing is written after it."""
        if self._failure is not None:
            return
        try:
            self._do(way, view, offset)
        except OSError as error:
            failure = StorageError(
                f"{self.where}: {_VERBS[way]} {len(view)} bytes failed ({error.strerror}); the state "
                "there is lost: see to the disk, or give another offload_dir, and resume from the last checkpoint"
            )
            failure.__cause__ = error
            self._failure = self._failure or failure

    def _do(self, way: str, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            descriptor = self._descriptor
            try:
                count = _CALLS[way](descriptor, [view[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or descriptor == self._plain:
                    raise
                self._descriptor = self._plain  # it could be opened for direct access, and does not do it
                continue
            if count < PAGE_NBYTES:
                raise OSError(errno.EIO, f"it ended after {done + count} bytes")
            done += count // PAGE_NBYTES * PAGE_NBYTES
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            # what was read is not read again soon, and what was written starts on its way to the disk
            os.posix_fadvise(self._plain, offset, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Waits for all operations and frees the file's space."""
        self._threads.shutdown()
        self._close()


def _opened(folder: Path, subject: str, rank: int) -> tuple[int, int | None]:
    if not folder.is_dir():
        raise StorageError(f"{subject}: is no folder that rank {rank} sees; make it on every host, or give another")
    path = folder / f".hf_zero-swap-{rank}-{secrets.token_hex(8)}"
    plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return plain, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or a system, without direct access
        return plain, None
    finally:
        os.unlink(path)


def _close(threads: ThreadPoolExecutor, descriptors: list[int]) -> None:
    threads.shutdown(wait=False)  # it may be called on one of them; each piece under way holds the file
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass(frozen=True)
class Speed:
    """The speed of the slowest rank's disk, in bytes per second, while all ranks read or write at once."""

    read: float
    write: float

    @classmethod
    def measure(cls, file: SwapFile, comm: Comm) -> "Speed":
        """Writes and reads the beginning of a file that has nothing in it yet: zeros. Collective. Raises
        [`StorageError`] on all ranks, when the disk refuses one of them."""
        nbytes = min(PROBE_NBYTES, file.nbytes)
        memory = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]

        def timed(move) -> float:
            start = time.perf_counter()
            move(0, memory).wait()
            return time.perf_counter() - start

        # steps write what was written before, which takes less time than the first write into reserved space
        _, write, read = (
            nbytes / max(*collect_from_all_ranks(comm, file.where, partial(timed, move), StorageError), 1e-9)
            for move in (file.write, file.write, file.read)
        )
        return cls(read=read, write=write)

    def log(self, file: SwapFile, what: str) -> None:
        """Logs how long a step takes in which everything in the file, where all that is needed has been reserved, is
        read and written once."""
        seconds = file.nbytes / self.read + file.nbytes / self.write
        way = "past the page cache" if file.is_direct else "through the page cache"
        line = f"{file.where}: {file.nbytes / 1e9:.2f} GB of {what} rest there, moved {way}"
        if seconds > 1:  # of little it is not known how fast much would be
            line += (
                f", read at {self.read / 1e6:.0f} MB/s and written at {self.write / 1e6:.0f} MB/s; an optimizer step "
                f"takes at least {seconds:.1f} s"
            )
        if min(self.read, self.write) < SLOW_NBYTES_PER_S and seconds > 1:
            logger.warning("%s; that is slow for an offload_dir: give one on a local NVMe disk", line)
        else:
            logger.info(line)
