"""Tensors that are stored in a file and loaded into memory in windows (ZeRO-Infinity, arXiv 2104.07857, section
5.1.2).

A record is a set of windows that are loaded together. While one record is in use, the next is read and the previous
one is written.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.storage.swap_file import PAGE_NBYTES, Speed, SwapFile, in_pages


# Number of elements in the windows of long tensors: with fp32 masters and Adam's state, a buffer takes 96 MiB.
WINDOW_NUMEL = 2**23
NUM_BUFFERS = 3  # for the records in use, being read, and being written


@dataclass(frozen=True)
class Extent:
    """The bytes of a file that hold a 1-D tensor or a window of it."""

    offset: int  # of the first byte, a multiple of the page size
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in the file, in full pages."""
        return in_pages(self.numel * self.dtype.itemsize)

    def window(self, start: int, stop: int) -> "Extent":
        """Returns the elements [start, stop), which start at a page boundary."""
        assert not start * self.dtype.itemsize % PAGE_NBYTES, f"a window from element {start} on is not whole pages"
        return Extent(self.offset + start * self.dtype.itemsize, stop - start, self.dtype)

    @property
    def stop(self) -> int:
        """The end of the last page."""
        return self.offset + self.nbytes

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it overlaps the bytes [start, stop) of the file."""
        return self.offset < stop and start < self.stop


Record = tuple[Extent, ...]  # extents that are loaded into memory together


def windows(numel: int) -> list[tuple[int, int]]:
    """Returns the ranges in which a tensor with `numel` elements is loaded into memory."""
    return [(start, min(start + WINDOW_NUMEL, numel)) for start in range(0, numel, WINDOW_NUMEL)]


class DiskBuffers:
    """A few memory buffers through which records of a swap file are read and written consecutively.

    They may be used by one thread at a time; other threads have their own buffers for the same file. `make` allocates
    a 1-D uint8 tensor of the given size, aligned to a page.
    """

    def __init__(self, file: SwapFile, make: Callable[[int], Tensor], num_buffers: int = NUM_BUFFERS):
        self.file = file
        self._make = make
        self._buffer_nbytes = 0
        self._limit = num_buffers
        self._num_buffers = 0
        self._released: deque[tuple[Tensor, list[Pending]]] = deque()  # buffers with their last uses
        self._here: dict[Record, Tensor] = {}
        self._ahead: tuple[Record, Tensor, list[Pending]] | None = None  # the prefetched record
        self._is_stale = False  # whether the prefetched record has been written since
        file.readers.add(self)

    def tensors(self, comm: Comm, parts: Sequence[tuple[int, torch.dtype]]) -> list["DiskTensor"]:
        """Reserves space in the file for zero-filled tensors, given this rank's number of elements and the dtype of
        each. Collective. Raises [`StorageError`] on all ranks if any of them lacks space."""
        sizes = [in_pages(numel * dtype.itemsize) for numel, dtype in parts]
        offsets = accumulate(sizes, initial=self.file.reserve(comm, sum(sizes)))
        return [DiskTensor(self, Extent(offset, *part)) for offset, part in zip(offsets, parts)]

    def walk(
        self, records: Sequence[Record], *, writes: bool, uses: list[Pending] | None = None, then: Record | None = None
    ) -> Iterator[list[Tensor]]:
        """Yields the tensors of one record after the other, while the next record is read and the previous one is
        written. The tensors are valid until the next iteration.

        Args:
            records (`Sequence[Record]`): the records to load.
            writes (`bool`): write the tensors back.
            uses (`list[Pending]`, *optional*): the caller appends operations that still read the tensors when it
                continues.
            then (`Record`, *optional*): the first record of a later walk, read while the last one is in use.

        Raises:
            `StorageError`: if a read or write fails.
        """
        uses = [] if uses is None else uses
        for record, following in zip(records, [*records[1:], then]):
            tensors = self.load(record)
            try:
                if following is not None:
                    self.prefetch(following)
                yield tensors
            finally:
                self.release(record, writes=writes, uses=uses)
                uses.clear()

    def prefetch(self, record: Record) -> None:
        """Starts to read the record that is loaded next. Optional, and may be called at any time."""
        is_here = any(one.overlaps(e.offset, e.stop) for used in self._here for one in used for e in record)
        if is_here or self._is_ahead(record):
            return
        self._drop_ahead()
        if len(self._here) + 1 < self._limit:
            self._is_stale = False
            self._ahead = record, *self._read(record)

    def written(self, start: int, stop: int) -> None:
        """Notifies the buffers that the bytes [start, stop) of the file are about to change."""
        if self._ahead is not None and any(extent.overlaps(start, stop) for extent in self._ahead[0]):
            self._is_stale = True

    def _is_ahead(self, record: Record) -> bool:
        return self._ahead is not None and self._ahead[0] == record and not self._is_stale

    def load(self, record: Record, *, reads: bool = True) -> list[Tensor]:
        """Loads the tensors of a record into memory, where they stay until `release`. With `reads=False` their
        contents are undefined, for tensors that will be overwritten completely."""
        assert record not in self._here, "it is here already"
        if not reads:
            reading: list[Pending] = []
            buffer = self._claim(_nbytes(record))
        elif self._ahead is not None and self._is_ahead(record):
            (_, buffer, reading), self._ahead = self._ahead, None
        else:
            self._drop_ahead()
            buffer, reading = self._read(record)
        for read in reading:
            read.wait()
        self._here[record] = buffer
        return [memory[: e.numel * e.dtype.itemsize].view(e.dtype) for e, memory in _parts(record, buffer)]

    def release(self, record: Record, *, writes: bool, uses: Sequence[Pending] = ()) -> None:
        """Releases a loaded record. `writes` starts to write it back; otherwise changes are discarded. Its tensors
        must not be written to any more, but `uses` may still read them."""
        buffer = self._here.pop(record)
        writing = [self.file.write(e.offset, memory) for e, memory in _parts(record, buffer)] if writes else []
        self._released.append((buffer, [*writing, *uses]))

    def _read(self, record: Record) -> tuple[Tensor, list[Pending]]:
        buffer = self._claim(_nbytes(record))
        return buffer, [self.file.read(extent.offset, memory) for extent, memory in _parts(record, buffer)]

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            (_, buffer, reads), self._ahead = self._ahead, None
            self._released.append((buffer, reads))

    def _claim(self, nbytes: int) -> Tensor:
        """Returns a free buffer: a new one, or the one that was released first."""
        self._buffer_nbytes, buffer = max(self._buffer_nbytes, nbytes), None
        if self._released and self._num_buffers >= self._limit:
            buffer = self._wait_for_oldest()
        else:
            self._num_buffers += 1
        if buffer is None or buffer.numel() < self._buffer_nbytes:
            del buffer  # freed before the larger one is allocated
            buffer = self._make(self._buffer_nbytes)
        return buffer

    def _wait_for_oldest(self) -> Tensor:
        buffer, uses = self._released.popleft()
        for use in uses:
            use.wait()
        return buffer


@dataclass(frozen=True, eq=False)
class DiskTensor:
    """A 1-D tensor that is stored on disk."""

    buffers: DiskBuffers  # used to load it
    extent: Extent

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.extent.numel

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The ranges in which it is loaded into memory."""
        return windows(self.numel)

    def pieces(self, *, writes: bool, only: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields the windows as (first element, values). The values are valid until the next iteration. `writes`:
        write the values back; `only`: skip windows outside of this range."""
        low, high = only or (0, self.numel)
        cuts = [(start, stop) for start, stop in self.windows if start < high and low < stop]
        records = [(self.extent.window(*cut),) for cut in cuts]
        for (values,), (start, _) in zip(self.buffers.walk(records, writes=writes), cuts):
            yield start, values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrites the full window that starts at element `start`. The values may have any dtype."""
        record = (self.extent.window(start, start + values.numel()),)
        self.buffers.load(record, reads=False)[0].copy_(values)
        self.buffers.release(record, writes=True)


def _nbytes(record: Record) -> int:
    return sum(extent.nbytes for extent in record)


def _parts(record: Record, buffer: Tensor) -> Iterator[tuple[Extent, Tensor]]:
    """Yields each extent with its pages in a buffer."""
    start = 0
    for extent in record:
        yield extent, buffer[start : start + extent.nbytes]
        start += extent.nbytes


class DiskOffload:
    """The tensors of one rank that are stored on disk: masters, optimizer state, and at stage 3 compute shards.

    All ranks construct it, and call `swap`, together.

    `parts` are the number of elements and the dtype of each tensor of the model, which is zero at first. `casts`: some
    of the tensors are copies that are written while their masters are in memory. Raises [`StorageError`] on all ranks
    if any of them cannot write to the folder or lacks space.
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
        self._speed = Speed.measure(self._file, comm)  # while the file contains only zeros

    @property
    def nbytes(self) -> int:
        """The size of this rank's file in bytes."""
        return self._file.nbytes

    def prefetcher(self, tensors: list[DiskTensor], targets: Callable[[], list[Tensor]], **how) -> "DiskPrefetcher":
        """Returns a `DiskPrefetcher` for some of the tensors."""
        return DiskPrefetcher(self._gathered, self._bus, tensors, targets, **how)

    def swap(self, slices: Sequence[Any], state, state_of) -> "Swap":
        """Returns a `Swap` for masters and reserves space for their state. Collective."""
        swap = Swap(self._updated, self._comm, slices, state, state_of)
        if self._comm.rank == 0:
            self._speed.log(self._file, "masters and optimizer state")
        return swap


class DiskPrefetcher:
    """Reads tensors before the all-gathers that need them and copies them to the device.

    The tensors are gathered together, into the device tensors that `targets` returns. With `in_windows`, for tensors
    that may not fit into memory, one window is loaded at a time.
    """

    def __init__(self, buffers: DiskBuffers, bus: Bus, tensors: list[DiskTensor], targets, *, in_windows: bool):
        self._buffers = buffers
        self._bus = bus
        self._targets = targets
        # what is in memory together: indices of tensors, each with a range
        self._parts = [[(index, 0, tensor.numel) for index, tensor in enumerate(tensors)]]
        if in_windows:
            self._parts = [[(index, *window)] for index, tensor in enumerate(tensors) for window in tensor.windows]
        self._records = [tuple(tensors[i].extent.window(*window) for i, *window in part) for part in self._parts]

    def prefetch(self) -> None:
        """Starts to read the values for the next `load`."""
        self._buffers.prefetch(self._records[0])

    def load(self) -> Pending:
        """Starts to copy the values to the device."""
        transfer, targets = Pending(), self._targets()
        uses: list[Pending] = []
        for tensors, parts in zip(self._buffers.walk(self._records, writes=False, uses=uses), self._parts):
            for (index, start, stop), values in zip(parts, tensors):
                transfer = self._bus.up(targets[index][start:stop], values)
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
        turns: dict[Record, tuple[DiskTensor, tuple[int, int], list]] = {}
        for each in slices:
            master = each.on_disk
            window = next((a, b) for a, b in master.windows if a <= each.within.start < b)
            record = tuple(one.extent.window(*window) for one in (master, *self._tensors[master].values()))
            turns.setdefault(record, (master, window, []))[2].append(each)
        for record in turns:
            self._next[self._last] = record
            self._last = record
        uses: list[Pending] = []
        loaded = self._buffers.walk(list(turns), writes=writes, uses=uses, then=self._next.get(self._last))
        for (values, *tensors), (master, window, own) in zip(loaded, turns.values()):
            state = dict(zip(self._tensors[master], tensors))
            parts = [slice(each.within.start - window[0], each.within.stop - window[0]) for each in own]
            try:
                for each, part in zip(own, parts):
                    self._show(each.param, values[part], {key: tensor[part] for key, tensor in state.items()})
                yield Turn(own, window, values, uses)
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
