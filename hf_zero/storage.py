"""Offload to disk: tensors are stored in a file and loaded into memory in windows (ZeRO-Infinity, arXiv 2104.07857,
section 5.1.2).

A record is a set of windows that are loaded together. While one record is in use, the next is read and the previous
one is written. One thread reads and writes a rank's file, in the order of the calls.
"""

import errno
import mmap
import os
import secrets
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.errors import StorageError, size_text


# Number of elements in the windows of long tensors: with fp32 masters and Adam's state, a buffer takes 96 MiB.
WINDOW_NUMEL = 2**23
NUM_BUFFERS = 3  # for the records in use, being read, and being written
PAGE_NBYTES = 4096  # direct I/O needs offsets, lengths and addresses that are multiples of the sector size
READ, WRITE = "disk read", "disk write"


class SwapFile:
    """A rank's unlinked file in a folder, which ranks and hosts may share. It disappears however the process ends.

    All ranks construct it together, and call `reserve` together. Both raise [`StorageError`] on all ranks if the
    folder does not exist, is not writable or lacks space on any of them.

    Reads and writes are executed in the order of the calls, so a read returns what was written before it. They bypass
    the page cache if the file system supports that. After one has failed, all further ones raise.
    """

    def __init__(self, comm: Comm, folder: str | os.PathLike):
        self.folder = Path(os.path.abspath(folder))
        self.nbytes = 0  # reserved so far
        self._comm = comm
        subject = f"offload_dir {self.folder}"
        self._where = f"{subject} (rank {comm.rank})"
        # for allocation, and for I/O
        self._descriptor, self._io = run_on_all_ranks(
            comm, subject, lambda: _opened(self.folder, subject, comm.rank), StorageError
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_zero-disk")
        self._failure: StorageError | None = None
        weakref.finalize(self, _close, self._thread, {self._descriptor, self._io})

    def reserve(self, nbytes: int) -> int:
        """Allocates zero-filled space at the end of the file (rounded up to full pages) and returns its offset, so
        that a full disk is detected early."""
        start, nbytes = self.nbytes, in_pages(nbytes)
        run_on_all_ranks(self._comm, self._where, lambda: self._allocate(start, nbytes), StorageError)
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
                f"{self._where}: needs another {size_text(nbytes)}, but only {size_text(free_nbytes)} are free "
                f"({error.strerror}); free space, set another offload_dir, or use more ranks"
            ) from error

    def transfer(self, way: str, parts: Sequence[tuple[int, Tensor]]) -> Pending:
        """Reads or writes parts of the file, each given by its offset and host memory of full pages, which must not
        change until the result has been waited for. `wait` raises [`StorageError`] if it has failed."""
        views = [(memory.view(torch.uint8).numpy().data, offset) for offset, memory in parts]
        return Pending(self._thread.submit(self._transfer, way, views).result)

    def _transfer(self, way: str, views: list[tuple[memoryview, int]]) -> None:
        """Reads or writes, on the thread."""
        if self._failure is None:
            try:
                for view, offset in views:
                    self._do(way, view, offset)
                    self._comm.counters.add(way, len(view))
            except OSError as error:
                self._failure = StorageError(
                    f"{self._where}: a {way} failed ({error.strerror}) and the offloaded state is lost; check the "
                    "disk or set another offload_dir, and resume from the last checkpoint"
                )
        if self._failure is not None:
            raise self._failure

    def _do(self, way: str, view: memoryview, offset: int) -> None:
        call = os.preadv if way == READ else os.pwritev
        done = 0
        while done < len(view):
            count = call(self._io, [view[done:]], offset + done)
            if count < PAGE_NBYTES:
                raise OSError(errno.EIO, f"end of file after {done + count} bytes")
            done += count // PAGE_NBYTES * PAGE_NBYTES


def in_pages(nbytes: int) -> int:
    """Rounds `nbytes` up to full pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _opened(folder: Path, subject: str, rank: int) -> tuple[int, int]:
    """Creates an unlinked file and opens it for direct I/O too, if possible."""
    if not folder.is_dir():
        raise StorageError(f"{subject}: rank {rank} does not see this folder; create it on every host, or set another")
    path = folder / f".hf_zero-swap-{rank}-{secrets.token_hex(8)}"
    plain = direct = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        os.preadv(direct, [mmap.mmap(-1, PAGE_NBYTES)], 0)  # some only refuse the first access
    except (OSError, AttributeError):  # a file system, or a system, without direct I/O
        if direct != plain:
            os.close(direct)
        direct = plain
    finally:
        os.unlink(path)
    return plain, direct


def _close(thread: ThreadPoolExecutor, descriptors: set[int]) -> None:
    thread.shutdown(wait=False)  # may be called on this thread; a transfer in progress keeps the file alive
    for descriptor in descriptors:
        os.close(descriptor)


class Window:
    """The elements [start, stop) of a tensor on disk, which start at a page boundary."""

    def __init__(self, tensor: "DiskTensor", start: int, stop: int):
        self.start, self.stop = start, stop
        self.dtype = tensor.dtype
        self.offset = tensor.offset + start * tensor.dtype.itemsize
        self.nbytes = in_pages((stop - start) * tensor.dtype.itemsize)  # in the file, in full pages
        self.num_writes = 0


Record = tuple[Window, ...]


class DiskTensor:
    """A 1-D tensor that is stored on disk from byte `offset` of the file of `buffers` on, in `windows`."""

    def __init__(self, buffers: "DiskBuffers", offset: int, numel: int, dtype: torch.dtype):
        self.buffers = buffers
        self.offset = offset
        self.numel = numel
        self.dtype = dtype
        starts = range(0, numel, WINDOW_NUMEL)
        self.windows = [Window(self, start, min(start + WINDOW_NUMEL, numel)) for start in starts]

    def pieces(self, *, writes: bool, only: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields the windows as (first element, values). The values are valid until the next iteration. `writes`:
        write the values back; `only`: skip windows outside of this range."""
        low, high = only or (0, self.numel)
        windows = [window for window in self.windows if window.start < high and low < window.stop]
        for (values,), window in zip(self.buffers.walk([(window,) for window in windows], writes=writes), windows):
            yield window.start, values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrites the full window that starts at element `start`. The values may have any dtype."""
        self.buffers.write(next(window for window in self.windows if window.start == start), values)


class DiskBuffers:
    """A few memory buffers through which records of a swap file are read and written consecutively.

    They may be used by one thread at a time; other threads have their own buffers for the same file.

    Args:
        file (`SwapFile`): The file.
        make (`Callable`): Allocates a 1-D uint8 tensor of the given size, aligned to a page.
        num_buffers (`int`): Number of buffers.
    """

    def __init__(self, file: SwapFile, make: Callable[[int], Tensor], num_buffers: int = NUM_BUFFERS):
        self._file = file
        self._make = make
        self._limit = num_buffers
        self._num_made = 0
        self._buffer_nbytes = 0
        self._free: deque[tuple[Tensor, list[Pending]]] = deque()  # released buffers with their last uses
        # the prefetched record, how often its windows had been written, its buffer, and the read
        self._ahead: tuple[Record, list[int], Tensor, Pending] | None = None

    def tensors(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[DiskTensor]:
        """Reserves space in the file for zero-filled tensors, given this rank's number of elements and the dtype of
        each. Collective, see `SwapFile.reserve`."""
        sizes = [in_pages(numel * dtype.itemsize) for numel, dtype in parts]
        offsets = accumulate(sizes, initial=self._file.reserve(sum(sizes)))
        return [DiskTensor(self, offset, *part) for offset, part in zip(offsets, parts)]

    def walk(
        self, records: Sequence[Record], *, writes: bool, uses: list[Pending] | None = None, then: Record | None = None
    ) -> Iterator[list[Tensor]]:
        """Yields the values of one record after the other, one tensor for each window, while the next record is read
        and the previous one is written. The tensors are valid until the next iteration.

        Args:
            records (`Sequence[Record]`): The records to load.
            writes (`bool`): Write the tensors back.
            uses (`list[Pending]`, *optional*): The caller appends operations that still read the tensors when it
                continues.
            then (`Record`, *optional*): The first record of a later walk, read while the last one is in use.

        Raises:
            `StorageError`: If a read or write fails.
        """
        uses = [] if uses is None else uses
        for record, following in zip(records, [*records[1:], then]):
            buffer = self._load(record)
            try:
                if following not in (None, record):
                    self.prefetch(following)
                yield [values for _, _, values in _parts(record, buffer)]
            finally:
                if writes:
                    uses.append(self._write(record, buffer))
                self._free.append((buffer, list(uses)))
                uses.clear()

    def prefetch(self, record: Record) -> None:
        """Starts to read the record that is loaded next. Optional, and may be called at any time."""
        num_writes = [window.num_writes for window in record]
        if self._ahead is not None and self._ahead[:2] != (record, num_writes):
            (_, _, buffer, reading), self._ahead = self._ahead, None
            self._free.append((buffer, [reading]))
        if self._ahead is None:
            buffer = self._claim(record)
            reading = self._file.transfer(READ, [part[:2] for part in _parts(record, buffer)])
            self._ahead = record, num_writes, buffer, reading

    def write(self, window: Window, values: Tensor) -> None:
        """Overwrites a window."""
        buffer = self._claim((window,))
        [(_, _, target)] = _parts((window,), buffer)
        target.copy_(values)
        self._free.append((buffer, [self._write((window,), buffer)]))

    def _load(self, record: Record) -> Tensor:
        self.prefetch(record)
        assert self._ahead is not None
        (_, _, buffer, reading), self._ahead = self._ahead, None
        reading.wait()
        return buffer

    def _write(self, record: Record, buffer: Tensor) -> Pending:
        writing = self._file.transfer(WRITE, [part[:2] for part in _parts(record, buffer)])
        for window in record:
            window.num_writes += 1  # after the write has begun: earlier reads are outdated
        return writing

    def _claim(self, record: Record) -> Tensor:
        """Returns a free buffer: a new one, or the one that was released first."""
        self._buffer_nbytes, buffer = max(self._buffer_nbytes, sum(window.nbytes for window in record)), None
        if self._free and self._num_made >= self._limit:
            buffer, uses = self._free.popleft()
            for use in uses:
                use.wait()
        else:
            self._num_made += 1
        if buffer is None or buffer.numel() < self._buffer_nbytes:
            del buffer  # freed before the larger one is allocated
            buffer = self._make(self._buffer_nbytes)
        return buffer


def _parts(record: Record, buffer: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Returns for each window its offset in the file, and its full pages and its elements in a buffer."""
    sizes = [window.nbytes for window in record]
    pages_of = zip(record, buffer[: sum(sizes)].split(sizes))
    return [
        (window.offset, pages, pages.view(window.dtype)[: window.stop - window.start]) for window, pages in pages_of
    ]


class DiskOffload:
    """The tensors of one rank that are stored on disk: masters, optimizer state, and at stage 3 compute shards.

    All ranks construct it together, see `SwapFile`.

    Args:
        comm (`Comm`): The ranks.
        folder (`str`): The folder for the ranks' files.
        bus (`Bus`): Allocates memory that the device can copy.
        parts (`Sequence`): The number of elements and the dtype of each tensor of the model, which is zero at first.
        casts (`bool`): Some of the tensors are copies that are written while their masters are in memory.
    """

    def __init__(
        self,
        comm: Comm,
        folder: str | os.PathLike,
        bus: Bus,
        parts: Sequence[tuple[int, torch.dtype]],
        *,
        casts: bool = False,
    ):
        make = partial(bus.empty, dtype=torch.uint8)
        self.file = SwapFile(comm, folder)
        self.updated = DiskBuffers(self.file, make, NUM_BUFFERS + casts)  # used by the optimizer's thread
        self.gathered = DiskBuffers(self.file, make)
        self.tensors = self.updated.tensors(parts)


class DiskPrefetcher:
    """Reads tensors before the all-gathers that need them and copies them to the device.

    The tensors are gathered together, into the device tensors that `targets` returns. With `in_windows`, for tensors
    that may not fit into memory, one window is loaded at a time.
    """

    def __init__(self, buffers: DiskBuffers, bus: Bus, tensors: list[DiskTensor], targets, *, in_windows: bool):
        self._buffers = buffers
        self._bus = bus
        self._targets = targets
        self._index_of = {window: index for index, tensor in enumerate(tensors) for window in tensor.windows}
        self._records = [(window,) for window in self._index_of] if in_windows else [tuple(self._index_of)]

    def prefetch(self) -> None:
        """Starts to read the values for the next `load`."""
        self._buffers.prefetch(self._records[0])

    def load(self) -> Pending:
        """Starts to copy the values to the device."""
        transfer, targets = Pending(), self._targets()
        uses: list[Pending] = []
        for found, record in zip(self._buffers.walk(self._records, writes=False, uses=uses), self._records):
            for window, values in zip(record, found):
                transfer = self._bus.up(targets[self._index_of[window]][window.start : window.stop], values)
                uses.append(Pending(transfer.synchronize))
        return transfer


class Turn(NamedTuple):
    """The slices in one window of a tensor, while their masters and state are in memory."""

    slices: list
    window: tuple[int, int]
    master: Tensor  # values of the window
    uses: list[Pending]  # operations that still read `master` after the turn


class Swap:
    """Loads slices, each within one window of its tensor, into memory together with their state. At other times their
    tensors contain NaN. All ranks construct it together, since it reserves space for the state.

    Args:
        slices (`Sequence`): each has a `param`, which shows the range `within` of the tensor `on_disk`.
        state (`dict`): the optimizer's state. Scalars stay in memory.
        state_of (`Callable`): returns the dtypes of a slice's state tensors, by key.
    """

    def __init__(self, buffers: DiskBuffers, slices: Sequence[Any], state: dict, state_of: Callable):
        self._buffers = buffers
        self._state = state
        keys: dict[DiskTensor, dict[str, torch.dtype]] = {}
        for each in slices:
            keys.setdefault(each.on_disk, {}).update(state_of(each))
        parts = [(master.numel, dtype) for master, own in keys.items() for dtype in own.values()]
        tensors = iter(buffers.tensors(parts))
        self._tensors = {master: {key: next(tensors) for key in own} for master, own in keys.items()}
        self._last: Record = ()
        self._next: dict[Record, Record] = {}  # the record that followed each one in the last walk

    def walk(self, slices: Sequence[Any], *, writes: bool) -> Iterator[Turn]:
        """Yields slices window by window, while the next ones are read and, with `writes`, masters and state of the
        previous ones are written back."""
        turns: dict[Record, list] = {}
        for each in slices:
            number = each.within.start // WINDOW_NUMEL
            own = (each.on_disk, *self._tensors[each.on_disk].values())
            turns.setdefault(tuple(tensor.windows[number] for tensor in own), []).append(each)
        for record in turns:
            self._next[self._last] = record
            self._last = record
        uses: list[Pending] = []
        loaded = self._buffers.walk(list(turns), writes=writes, uses=uses, then=self._next.get(self._last))
        for (values, *tensors), ((window, *_), shown) in zip(loaded, turns.items()):
            state = dict(zip(self._tensors[shown[0].on_disk], tensors))
            parts = [slice(each.within.start - window.start, each.within.stop - window.start) for each in shown]
            try:
                for each, part in zip(shown, parts):
                    self._show(each.param, values[part], {key: tensor[part] for key, tensor in state.items()})
                yield Turn(shown, (window.start, window.stop), values, uses)
            finally:
                for each, part in zip(shown, parts):
                    self._hide(each.param, {key: tensor[part] for key, tensor in state.items()})

    def _show(self, param: nn.Parameter, values: Tensor, state: dict[str, Tensor]) -> None:
        param.data = values
        own = self._state.get(param, {})
        own.update({key: tensor for key, tensor in state.items() if key in own})

    def _hide(self, param: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Replaces the tensors of a slice by NaN, after saving state that the optimizer has newly allocated."""
        param.data = _nothing(param)
        own = self._state.get(param, {})
        for key in state.keys() & own.keys():
            if own[key].data_ptr() != state[key].data_ptr():
                state[key].copy_(own[key])
            own[key] = _nothing(own[key])


def _nothing(tensor: Tensor) -> Tensor:
    """Returns NaN (0 for dtypes without NaN) in the shape of a tensor, without its memory."""
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
