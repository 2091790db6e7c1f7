"""The file that stores one rank's tensors. It is read and written by a few threads in pieces, bypassing the page cache
if possible. io_uring was not faster, see `docs/design.md`."""

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

PAGE_NBYTES = 4096  # direct I/O needs offsets, lengths and addresses that are multiples of the sector size
PIECE_NBYTES = 8 * 2**20
NUM_THREADS = 4
PROBE_NBYTES = 64 * 2**20
SLOW_NBYTES_PER_S = 500e6  # local SSDs (SATA, PCIe) are faster; slower storage is a hard disk or a network file system

READ, WRITE = "disk read", "disk write"
_CALLS = {READ: lambda *where: os.preadv(*where), WRITE: lambda *where: os.pwritev(*where)}
_VERBS = {READ: "reading", WRITE: "writing"}


def in_pages(nbytes: int) -> int:
    """Rounds `nbytes` up to full pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True)
class _Operation:
    """A read or write in progress."""

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
    """An unlinked file, which disappears however the process ends. Use `open` to create it.

    Reads and writes wait for operations in progress on the same bytes, so reads return what was written before. After
    a read or write has failed, all further operations raise. Bytes are counted as "disk read" and "disk write".

    `where` names the folder and the rank in messages. `descriptors` are for ordinary and for direct I/O (`None` if the
    file system does not support it); this object owns them.
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
        self.readers: weakref.WeakSet = weakref.WeakSet()  # objects whose `written` is called before bytes change
        opened = [descriptor for descriptor in descriptors if descriptor is not None]
        self._close = weakref.finalize(self, _close, self._threads, opened)

    @classmethod
    def open(cls, comm: Comm, folder: str | os.PathLike) -> "SwapFile":
        """Creates each rank's file in a folder, which ranks and hosts may share. Collective. Raises [`StorageError`]
        on all ranks if the folder does not exist or is not writable on any of them."""
        folder = Path(os.path.abspath(folder))
        subject = f"offload_dir {folder}"
        descriptors = run_on_all_ranks(comm, subject, lambda: _opened(folder, subject, comm.rank), StorageError)
        return cls(f"{subject} (rank {comm.rank})", folder, descriptors, comm.counters)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._descriptor != self._plain

    def reserve(self, comm: Comm, nbytes: int) -> int:
        """Allocates zero-filled space at the end of the file (rounded up to full pages) and returns its offset, so
        that a full disk is detected early. Collective. Raises [`StorageError`] on all ranks if any of them lacks
        space."""
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
                f"{self.where}: needs another {size_text(nbytes)}, but only {size_text(free_nbytes)} are free "
                f"({error.strerror}); free space, set another offload_dir, or use more ranks"
            ) from error

    def read(self, offset: int, memory: Tensor) -> Pending:
        """Reads the file at `offset`, a multiple of the page size, into `memory`, contiguous full pages of host
        memory. `wait` of the result raises [`StorageError`] if the read fails."""
        return self._move(READ, offset, memory)

    def write(self, offset: int, memory: Tensor) -> Pending:
        """Writes `memory`, which must not change until the result has been waited for. See `read`."""
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
        """Waits for operations in progress that overlap the range and must finish first."""
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
        """Transfers one piece, on a thread. Records the first failure, after which nothing is transferred."""
        if self._failure is not None:
            return
        try:
            self._do(way, view, offset)
        except OSError as error:
            failure = StorageError(
                f"{self.where}: {_VERBS[way]} {len(view)} bytes failed ({error.strerror}) and the offloaded state is "
                "lost; check the disk or set another offload_dir, and resume from the last checkpoint"
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
                self._descriptor = self._plain  # direct I/O could be opened but is not supported
                continue
            if count < PAGE_NBYTES:
                raise OSError(errno.EIO, f"end of file after {done + count} bytes")
            done += count // PAGE_NBYTES * PAGE_NBYTES
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            # data just read is not needed again soon; for data just written, this starts the writeback
            os.posix_fadvise(self._plain, offset, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Waits for all operations and frees the file's space."""
        self._threads.shutdown()
        self._close()


def _opened(folder: Path, subject: str, rank: int) -> tuple[int, int | None]:
    if not folder.is_dir():
        raise StorageError(f"{subject}: rank {rank} does not see this folder; create it on every host, or set another")
    path = folder / f".hf_zero-swap-{rank}-{secrets.token_hex(8)}"
    plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return plain, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or a system, without direct access
        return plain, None
    finally:
        os.unlink(path)


def _close(threads: ThreadPoolExecutor, descriptors: list[int]) -> None:
    threads.shutdown(wait=False)  # may be called on one of the threads; pieces in progress keep the file alive
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass(frozen=True)
class Speed:
    """Read and write speed of the slowest rank in bytes per second, while all ranks use their disks concurrently."""

    read: float
    write: float

    @classmethod
    def measure(cls, file: SwapFile, comm: Comm) -> "Speed":
        """Measures the speed by writing and reading zeros at the start of a file that is still empty. Collective.
        Raises [`StorageError`] on all ranks if this fails on any of them."""
        nbytes = min(PROBE_NBYTES, file.nbytes)
        memory = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]

        def timed(move) -> float:
            start = time.perf_counter()
            move(0, memory).wait()
            return time.perf_counter() - start

        # the first write into reserved space is slower than the overwrites of training steps
        _, write, read = (
            nbytes / max(*collect_from_all_ranks(comm, file.where, partial(timed, move), StorageError), 1e-9)
            for move in (file.write, file.write, file.read)
        )
        return cls(read=read, write=write)

    def log(self, file: SwapFile, what: str) -> None:
        """Logs the size of the file and the minimum time of a step that reads and writes all of it once."""
        seconds = file.nbytes / self.read + file.nbytes / self.write
        way = "bypassing the page cache" if file.is_direct else "through the page cache"
        line = f"{file.where}: stores {file.nbytes / 1e9:.2f} GB of {what}, {way}"
        if seconds > 1:  # small files do not predict the speed of large ones
            line += (
                f", read at {self.read / 1e6:.0f} MB/s and written at {self.write / 1e6:.0f} MB/s; an optimizer step "
                f"takes at least {seconds:.1f} s"
            )
        if min(self.read, self.write) < SLOW_NBYTES_PER_S and seconds > 1:
            logger.warning("%s; this is slow for an offload_dir: use a local NVMe disk", line)
        else:
            logger.info(line)
