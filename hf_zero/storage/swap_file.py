"""The file that stores one rank's tensors, read and written by one thread."""

import errno
import mmap
import os
import secrets
import shutil
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.comm import Comm, Counters, Pending
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.errors import StorageError, size_text


PAGE_NBYTES = 4096  # direct I/O needs offsets, lengths and addresses that are multiples of the sector size
READ, WRITE = "disk read", "disk write"
_CALLS = {READ: lambda *where: os.preadv(*where), WRITE: lambda *where: os.pwritev(*where)}


def in_pages(nbytes: int) -> int:
    """Rounds `nbytes` up to full pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class SwapFile:
    """An unlinked file, which disappears however the process ends. Use `open` to create it.

    Reads and writes are executed in the order of the calls, so a read returns what was written before it. They bypass
    the page cache if the file system supports that. After one has failed, all further ones raise.

    Args:
        where (`str`): The folder and the rank, for messages.
        folder (`Path`): The folder of the file.
        descriptors (`tuple[int, int]`): For allocation and for I/O. This object owns them.
        counters (`Counters`): Counts bytes as "disk read" and "disk write".
    """

    def __init__(self, where: str, folder: Path, descriptors: tuple[int, int], counters: Counters):
        self.where = where
        self.folder = folder
        self.nbytes = 0  # reserved so far
        self._descriptor, self._io = descriptors
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_zero-disk")
        self._failure: StorageError | None = None
        weakref.finalize(self, _close, self._thread, set(descriptors))

    @classmethod
    def open(cls, comm: Comm, folder: str | os.PathLike) -> "SwapFile":
        """Creates each rank's file in a folder, which ranks and hosts may share. Collective. Raises [`StorageError`]
        on all ranks if the folder does not exist or is not writable on any of them."""
        folder = Path(os.path.abspath(folder))
        subject = f"offload_dir {folder}"
        descriptors = run_on_all_ranks(comm, subject, lambda: _opened(folder, subject, comm.rank), StorageError)
        return cls(f"{subject} (rank {comm.rank})", folder, descriptors, comm.counters)

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
                os.posix_fallocate(self._descriptor, start, nbytes)
            else:
                os.ftruncate(self._descriptor, start + nbytes)
        except OSError as error:
            raise StorageError(
                f"{self.where}: needs another {size_text(nbytes)}, but only {size_text(free_nbytes)} are free "
                f"({error.strerror}); free space, set another offload_dir, or use more ranks"
            ) from error

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> Pending:
        """Reads parts of the file, each given by its offset and host memory of full pages. `wait` of the result raises
        [`StorageError`] if the read fails."""
        return self._submit(READ, parts)

    def write(self, parts: Sequence[tuple[int, Tensor]]) -> Pending:
        """Writes memory, which must not change until the result has been waited for. See `read`."""
        return self._submit(WRITE, parts)

    def _submit(self, way: str, parts: Sequence[tuple[int, Tensor]]) -> Pending:
        views = [(memory.view(torch.uint8).numpy().data, offset) for offset, memory in parts]
        return Pending(self._thread.submit(self._transfer, way, views).result)

    def _transfer(self, way: str, views: list[tuple[memoryview, int]]) -> None:
        """Reads or writes, on the thread."""
        if self._failure is None:
            try:
                for view, offset in views:
                    self._do(way, view, offset)
                    self._counters.add(way, len(view))
            except OSError as error:
                self._failure = StorageError(
                    f"{self.where}: a {way} failed ({error.strerror}) and the offloaded state is lost; check the disk "
                    "or set another offload_dir, and resume from the last checkpoint"
                )
        if self._failure is not None:
            raise self._failure

    def _do(self, way: str, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = _CALLS[way](self._io, [view[done:]], offset + done)
            if count < PAGE_NBYTES:
                raise OSError(errno.EIO, f"end of file after {done + count} bytes")
            done += count // PAGE_NBYTES * PAGE_NBYTES


def _opened(folder: Path, subject: str, rank: int) -> tuple[int, int]:
    """Creates an unlinked file and opens it for direct I/O too, if possible."""
    if not folder.is_dir():
        raise StorageError(f"{subject}: rank {rank} does not see this folder; create it on every host, or set another")
    path = folder / f".hf_zero-swap-{rank}-{secrets.token_hex(8)}"
    plain = direct = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError, AttributeError):  # a file system, or a system, without direct I/O
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            os.preadv(direct, [mmap.mmap(-1, PAGE_NBYTES)], 0)  # some only refuse the first access
            return plain, direct
        return plain, plain
    finally:
        os.unlink(path)


def _close(thread: ThreadPoolExecutor, descriptors: set[int]) -> None:
    thread.shutdown(wait=False)  # may be called on this thread; a transfer in progress keeps the file alive
    for descriptor in descriptors:
        os.close(descriptor)
