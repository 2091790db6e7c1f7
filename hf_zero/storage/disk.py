"""Tensors that are stored in a file and loaded into memory in windows (ZeRO-Infinity, arXiv 2104.07857, section
5.1.2).

A record is a set of windows that are loaded together. While one record is in use, the next is read and the previous
one is written.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.storage.swap_file import SwapFile, in_pages


# Number of elements in the windows of long tensors: with fp32 masters and Adam's state, a buffer takes 96 MiB.
WINDOW_NUMEL = 2**23
NUM_BUFFERS = 3  # for the records in use, being read, and being written


class DiskTensor:
    """A 1-D tensor on disk. It begins at byte `offset` of the file of `buffers`."""

    def __init__(self, buffers: "DiskBuffers", offset: int, numel: int, dtype: torch.dtype):
        self.buffers = buffers
        self.offset = offset
        self.numel = numel
        self.dtype = dtype
        self.num_writes: Counter[int] = Counter()  # by first element of a window

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The ranges in which it is loaded into memory."""
        return [(start, min(start + WINDOW_NUMEL, self.numel)) for start in range(0, self.numel, WINDOW_NUMEL)]

    def pieces(self, *, writes: bool, only: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields the windows as (first element, values). The values are valid until the next iteration. `writes`:
        write the values back; `only`: skip windows outside of this range."""
        low, high = only or (0, self.numel)
        records = [(Window(self, *cut),) for cut in self.windows if cut[0] < high and low < cut[1]]
        for (values,), (window,) in zip(self.buffers.walk(records, writes=writes), records):
            yield window.start, values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrites the full window that starts at element `start`. The values may have any dtype."""
        self.buffers.write(Window(self, start, start + values.numel()), values)


class Window(NamedTuple):
    """The elements [start, stop) of a tensor on disk, which start at a page boundary."""

    tensor: DiskTensor
    start: int
    stop: int

    @property
    def offset(self) -> int:
        return self.tensor.offset + self.start * self.tensor.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size in the file, in full pages."""
        return in_pages((self.stop - self.start) * self.tensor.dtype.itemsize)

    @property
    def num_writes(self) -> int:
        return sum(self.tensor.num_writes[start] for start in range(self.start, self.stop, WINDOW_NUMEL))


Record = tuple[Window, ...]


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
        # the prefetched record, how often it had been written, its buffer, and the read
        self._ahead: tuple[Record, list[int], Tensor, Pending] | None = None

    def tensors(self, comm: Comm, parts: Sequence[tuple[int, torch.dtype]]) -> list[DiskTensor]:
        """Reserves space in the file for zero-filled tensors, given this rank's number of elements and the dtype of
        each. Collective. Raises [`StorageError`] on all ranks if any of them lacks space."""
        sizes = [in_pages(numel * dtype.itemsize) for numel, dtype in parts]
        offsets = accumulate(sizes, initial=self._file.reserve(comm, sum(sizes)))
        return [DiskTensor(self, offset, *part) for offset, part in zip(offsets, parts)]

    def walk(
        self, records: Sequence[Record], *, writes: bool, uses: list[Pending] | None = None, then: Record | None = None
    ) -> Iterator[list[Tensor]]:
        """Yields the tensors of one record after the other, while the next record is read and the previous one is
        written. The tensors are valid until the next iteration.

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
                yield _values(record, buffer)
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
            self._ahead = record, num_writes, buffer, self._file.read(_pages(record, buffer))

    def write(self, window: Window, values: Tensor) -> None:
        """Overwrites a window."""
        buffer = self._claim((window,))
        _values((window,), buffer)[0].copy_(values)
        self._free.append((buffer, [self._write((window,), buffer)]))

    def _load(self, record: Record) -> Tensor:
        self.prefetch(record)
        assert self._ahead is not None
        (_, _, buffer, reading), self._ahead = self._ahead, None
        reading.wait()
        return buffer

    def _write(self, record: Record, buffer: Tensor) -> Pending:
        writing = self._file.write(_pages(record, buffer))
        for window in record:
            window.tensor.num_writes[window.start] += 1  # after the write has begun: earlier reads are outdated
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


def _pages(record: Record, buffer: Tensor) -> list[tuple[int, Tensor]]:
    """Returns the offset in the file and the full pages in a buffer of each window."""
    sizes = [window.nbytes for window in record]
    return [(window.offset, pages) for window, pages in zip(record, buffer[: sum(sizes)].split(sizes))]


def _values(record: Record, buffer: Tensor) -> list[Tensor]:
    """Returns the elements of each window in a buffer."""
    views = zip(record, _pages(record, buffer))
    return [pages.view(window.tensor.dtype)[: window.stop - window.start] for window, (_, pages) in views]


class DiskOffload:
    """The tensors of one rank that are stored on disk: masters, optimizer state, and at stage 3 compute shards.

    All ranks construct it, and call `swap`, together. Both raise [`StorageError`] on all ranks if any of them cannot
    write to the folder or lacks space.

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
        self._comm = comm
        self._bus = bus
        make = partial(bus.empty, dtype=torch.uint8)
        self._file = SwapFile.open(comm, folder)
        self._updated = DiskBuffers(self._file, make, NUM_BUFFERS + casts)  # used by the optimizer's thread
        self._gathered = DiskBuffers(self._file, make)
        self.tensors = self._updated.tensors(comm, parts)

    @property
    def nbytes(self) -> int:
        """The size of this rank's file in bytes."""
        return self._file.nbytes

    def prefetcher(self, tensors: list[DiskTensor], targets: Callable[[], list[Tensor]], **how) -> "DiskPrefetcher":
        """Returns a `DiskPrefetcher` for some of the tensors."""
        return DiskPrefetcher(self._gathered, self._bus, tensors, targets, **how)

    def swap(self, slices: Sequence[Any], state: dict, state_of: Callable) -> "Swap":
        """Returns a `Swap` for masters and reserves space for their state."""
        return Swap(self._updated, self._comm, slices, state, state_of)


class DiskPrefetcher:
    """Reads tensors before the all-gathers that need them and copies them to the device.

    The tensors are gathered together, into the device tensors that `targets` returns. With `in_windows`, for tensors
    that may not fit into memory, one window is loaded at a time.
    """

    def __init__(self, buffers: DiskBuffers, bus: Bus, tensors: list[DiskTensor], targets, *, in_windows: bool):
        self._buffers = buffers
        self._bus = bus
        self._targets = targets
        self._index = {tensor: index for index, tensor in enumerate(tensors)}
        self._records: list[Record] = [tuple(Window(tensor, 0, tensor.numel) for tensor in tensors)]
        if in_windows:
            self._records = [(Window(tensor, *cut),) for tensor in tensors for cut in tensor.windows]

    def prefetch(self) -> None:
        """Starts to read the values for the next `load`."""
        self._buffers.prefetch(self._records[0])

    def load(self) -> Pending:
        """Starts to copy the values to the device."""
        transfer, targets = Pending(), self._targets()
        uses: list[Pending] = []
        for tensors, record in zip(self._buffers.walk(self._records, writes=False, uses=uses), self._records):
            for (tensor, start, stop), values in zip(record, tensors):
                transfer = self._bus.up(targets[self._index[tensor]][start:stop], values)
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
    tensors contain NaN.

    Args:
        slices (`Sequence`): each has a `param`, which shows the range `within` of the tensor `on_disk`.
        state (`dict`): the optimizer's state. Scalars stay in memory.
        state_of (`Callable`): returns the dtypes of a slice's state tensors, by key.

    Raises:
        `StorageError`: on all ranks, if any of them lacks space.
    """

    def __init__(self, buffers: DiskBuffers, comm: Comm, slices: Sequence[Any], state: dict, state_of):
        self._buffers = buffers
        self._state = state
        keys: dict[DiskTensor, dict[str, torch.dtype]] = {}
        for each in slices:
            keys.setdefault(each.on_disk, {}).update(state_of(each))
        parts = [(master.numel, dtype) for master, own in keys.items() for dtype in own.values()]
        tensors = iter(buffers.tensors(comm, parts))
        self._tensors = {master: {key: next(tensors) for key in own} for master, own in keys.items()}
        self._last: Record = ()
        self._next: dict[Record, Record] = {}  # the record that followed each one in the last walk

    def walk(self, slices: Sequence[Any], *, writes: bool) -> Iterator[Turn]:
        """Yields slices window by window, while the next ones are read and, with `writes`, masters and state of the
        previous ones are written back."""
        turns: dict[Record, list] = {}
        for each in slices:
            master = each.on_disk
            cut = next((start, stop) for start, stop in master.windows if start <= each.within.start < stop)
            record = tuple(Window(tensor, *cut) for tensor in (master, *self._tensors[master].values()))
            turns.setdefault(record, []).append(each)
        for record in turns:
            self._next[self._last] = record
            self._last = record
        uses: list[Pending] = []
        loaded = self._buffers.walk(list(turns), writes=writes, uses=uses, then=self._next.get(self._last))
        for (values, *tensors), (((master, start, stop), *_), own) in zip(loaded, turns.items()):
            state = dict(zip(self._tensors[master], tensors))
            parts = [slice(each.within.start - start, each.within.stop - start) for each in own]
            try:
                for each, part in zip(own, parts):
                    self._show(each.param, values[part], {key: tensor[part] for key, tensor in state.items()})
                yield Turn(own, (start, stop), values, uses)
            finally:
                for each, part in zip(own, parts):
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
