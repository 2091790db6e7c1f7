"""The part of a sharded model and its optimizer that rests on disk, and the two ways in which it comes into memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.storage.disk import NUM_BUFFERS, DiskBuffers, DiskTensor, Record
from hf_zero.storage.swap_file import Speed, SwapFile


class DiskOffload:
    """The tensors of one rank that rest on disk: masters, optimizer state, and at stage 3 compute shards.

    All ranks make it, and call `swap`, together.

    `parts` are the number of elements and the dtype of each tensor that a model has; `casts`: some of these `tensors`,
    which are zero, are written while the masters that they follow are in memory. Raises [`StorageError`] on all ranks,
    when one cannot write there, or has no room.
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
        self._updated = DiskBuffers(self._file, make, NUM_BUFFERS + casts)  # by the optimizer, which has a thread
        self._gathered = DiskBuffers(self._file, make)
        self.tensors = self._updated.tensors(comm, parts)
        self._speed = Speed.measure(self._file, comm)  # while all of it is zero

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's file."""
        return self._file.nbytes

    def prefetcher(self, tensors: list[DiskTensor], targets: Callable[[], list[Tensor]], **how) -> "DiskPrefetcher":
        """Makes a `DiskPrefetcher` for some of the tensors."""
        return DiskPrefetcher(self._gathered, self._bus, tensors, targets, **how)

    def swap(self, slices: Sequence["Swapped"], state, state_of) -> "Swap":
        """Makes a `Swap` for masters, and reserves room for their state. Collective."""
        swap = Swap(self._updated, self._comm, slices, state, state_of)
        if self._comm.rank == 0:
            self._speed.log(self._file, "masters and optimizer state")
        return swap


class DiskPrefetcher:
    """Reads tensors ahead of the all-gathers that need them, and sends them to the device.

    The tensors are gathered together, into what `targets` gives on the device; `in_windows` a part after the other,
    where they may be too large to be in memory whole.
    """

    def __init__(self, buffers: DiskBuffers, bus: Bus, tensors: list[DiskTensor], targets, *, in_windows: bool):
        self._buffers = buffers
        self._bus = bus
        self._targets = targets
        # what is in memory together: which of the tensors, and which range of it
        self._parts = [[(index, 0, tensor.numel) for index, tensor in enumerate(tensors)]]
        if in_windows:
            self._parts = [[(index, *window)] for index, tensor in enumerate(tensors) for window in tensor.windows]
        self._records = [tuple(tensors[i].extent.window(*window) for i, *window in part) for part in self._parts]

    def prefetch(self) -> None:
        """Begins to read the values for the next `load`."""
        self._buffers.prefetch(self._records[0])

    def load(self) -> Pending:
        """Begins to copy the values to the device, where they are gathered."""
        transfer, targets = Pending(), self._targets()
        uses: list[Pending] = []
        for tensors, parts in zip(self._buffers.walk(self._records, writes=False, uses=uses), self._parts):
            for (index, start, stop), values in zip(parts, tensors):
                transfer = self._bus.up(targets[index][start:stop], values)
                uses.append(Pending(transfer.synchronize))
        return transfer


class Swapped(Protocol):
    """A slice of a tensor on disk that an optimizer sees as a parameter."""

    param: nn.Parameter

    @property
    def on_disk(self) -> DiskTensor:
        """The tensor on disk in which the values rest."""

    @property
    def within(self) -> slice:
        """The range of the slice in that tensor."""


class Turn(NamedTuple):
    """The slices that lie in one window of a tensor, while their masters and state are in memory."""

    slices: list
    window: tuple[int, int]
    master: Tensor  # of the window
    uses: list[Pending]  # what still reads `master` when the turn is over


class Swap:
    """Brings slices, each within one window of its tensor, with their state, into memory in turn. In between their
    tensors read as NaN. Numbers in the optimizer's `state` stay in memory; `state_of` gives the dtypes of the tensors
    of a slice's state, by key. Raises [`StorageError`] on all ranks, when the disk has no room."""

    def __init__(self, buffers: DiskBuffers, comm: Comm, slices: Sequence[Swapped], state: dict, state_of):
        self._buffers = buffers
        self._state = state
        keys: dict[DiskTensor, dict[str, torch.dtype]] = {}
        for each in slices:
            keys.setdefault(each.on_disk, {}).update(state_of(each))
        places = [(master, key, dtype) for master, own in keys.items() for key, dtype in own.items()]
        tensors = buffers.tensors(comm, [(master.numel, dtype) for master, _, dtype in places])
        self._tensors: dict[DiskTensor, dict[str, DiskTensor]] = {master: {} for master in keys}
        for (master, key, _), tensor in zip(places, tensors):
            self._tensors[master][key] = tensor
        self._last: Record = ()
        self._next: dict[Record, Record] = {}  # what came next when it was last used

    def walk(self, slices: Sequence[Swapped], *, writes: bool) -> Iterator[Turn]:
        """Yields slices in turn. Meanwhile the next ones are read, and with `writes` the last ones, masters and state,
        written back."""
        turns: dict[Record, tuple[DiskTensor, tuple[int, int], list[Swapped]]] = {}
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
        """Replaces the tensors of a slice by NaN, after it has kept state that the optimizer has made meanwhile."""
        param.data = _nothing(param)
        own = self._state.get(param, {})
        for key in state.keys() & own.keys():
            if own[key].data_ptr() != state[key].data_ptr():
                state[key].copy_(own[key])
            own[key] = _nothing(own[key])


def _nothing(tensor: Tensor) -> Tensor:
    """Returns NaN, or 0 for dtypes that have none, in the shape of a tensor and without its memory."""
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
