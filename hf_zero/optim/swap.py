"""Masters and optimizer state that rest on disk: a few slices at a time are in memory, where they are updated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm, Pending
from hf_zero.engine.flat import Flat, Range
from hf_zero.engine.placeholder import Placeholders
from hf_zero.optim.flat_slices import FlatSlice
from hf_zero.storage import Disk, DiskTensor, Record, windows


@dataclass(frozen=True, eq=False)
class Turn:
    """The slices that lie in one piece of a buffer, while their masters and state are in memory.

    Args:
        flat (`Flat`): the buffer.
        covers (`tuple[int, int]`): the piece, counted in the buffer.
        master (`Tensor`): its masters.
        slices (`list[FlatSlice]`): those of the slices in question that lie in it.
        uses (`list[Pending]`): what still reads `master` when the turn is over.
    """

    flat: Flat
    covers: Range
    master: Tensor
    slices: list[FlatSlice]
    uses: list[Pending] = field(default_factory=list)


class Swap:
    """Brings slices, with their state, into memory in turn. In between their tensors read as NaN.

    Args:
        disk (`Disk`): where the masters rest.
        comm (`Comm`): the ranks.
        slices (`list[FlatSlice]`): all that are updated, each within one piece of its buffer.
        state (`dict`): the optimizer's, by slice's parameter. The numbers in it stay in memory.
        state_of (`Callable`): gives the dtypes of the tensors of a slice's state, by key.

    Raises:
        `StorageError`: on all ranks, when the disk has no room.
    """

    def __init__(
        self,
        disk: Disk,
        comm: Comm,
        *,
        slices: list[FlatSlice],
        state: dict[nn.Parameter, dict],
        state_of: Callable[[FlatSlice], dict[str, torch.dtype]],
    ):
        self._disk = disk
        self._state = state
        self._placeholders = Placeholders(torch.device("cpu"))
        keys: dict[Flat, dict[str, torch.dtype]] = {}
        for flat_slice in slices:
            keys.setdefault(flat_slice.flat, {}).update(state_of(flat_slice))
        places = [(flat, key, dtype) for flat, own in keys.items() for key, dtype in own.items()]
        extents = disk.extents(comm, [(flat.on_disk.extent.numel, dtype) for flat, _, dtype in places])
        self._tensors: dict[Flat, dict[str, DiskTensor]] = {flat: {} for flat in keys}
        for (flat, key, _), extent in zip(places, extents):
            self._tensors[flat][key] = DiskTensor(disk, extent)
        self._order: dict[Record, Record] = {}  # what came next when it was last used
        self._last: Record | None = None
        if comm.rank == 0:
            disk.log_speed("masters and optimizer state")

    def walk(self, slices: Sequence[FlatSlice], *, writes: bool) -> Iterator[Turn]:
        """Yields slices in turn; the next ones are read, and the last ones written, while some are here.

        Args:
            slices (`Sequence[FlatSlice]`): which.
            writes (`bool`): their masters and state are written back.
        """
        turns = self._turns(slices)
        for position, (flat, covers, own) in enumerate(turns):
            following = turns[position + 1][:2] if position + 1 < len(turns) else None
            with self._here(flat, covers, own, writes=writes) as turn:
                record = self._record(flat, covers)
                ahead = self._record(*following) if following else self._order.get(record)
                if ahead is not None:
                    self._disk.prefetch(ahead)
                yield turn

    def _turns(self, slices: Sequence[FlatSlice]) -> list[tuple[Flat, Range, list[FlatSlice]]]:
        found: dict[tuple[Flat, Range], list[FlatSlice]] = {}
        for flat_slice in slices:
            first, numel = flat_slice.flat.held[0], flat_slice.flat.on_disk.extent.numel
            covers = next(
                (first + a, first + b) for a, b in windows(numel) if first + a <= flat_slice.start < first + b
            )
            found.setdefault((flat_slice.flat, covers), []).append(flat_slice)
        return [(*place, own) for place, own in found.items()]

    def _record(self, flat: Flat, covers: Range) -> Record:
        start, stop = covers[0] - flat.held[0], covers[1] - flat.held[0]
        tensors = [flat.on_disk, *self._tensors[flat].values()]
        return tuple(tensor.extent.window(start, stop) for tensor in tensors)

    @contextmanager
    def _here(self, flat: Flat, covers: Range, slices: list[FlatSlice], *, writes: bool) -> Iterator[Turn]:
        record = self._record(flat, covers)
        if self._last is not None:
            self._order[self._last] = record
        self._last = record
        master, *tensors = self._disk.load(record)
        state = dict(zip(self._tensors[flat], tensors))
        turn = Turn(flat, covers, master, slices)
        try:
            for flat_slice in slices:
                self._show(flat_slice, turn, state)
            yield turn
        finally:
            for flat_slice in slices:
                self._hide(flat_slice, turn, state)
            self._disk.release(record, writes=writes, uses=turn.uses)

    def _show(self, flat_slice: FlatSlice, turn: Turn, state: dict[str, Tensor]) -> None:
        part = slice(flat_slice.start - turn.covers[0], flat_slice.stop - turn.covers[0])
        flat_slice.param.data = turn.master[part]
        own = self._state.get(flat_slice.param, {})
        own.update({key: tensor[part] for key, tensor in state.items() if key in own})

    def _hide(self, flat_slice: FlatSlice, turn: Turn, state: dict[str, Tensor]) -> None:
        """Puts NaN in place of a slice's tensors. State that the optimizer has made anew meanwhile is taken over."""
        part = slice(flat_slice.start - turn.covers[0], flat_slice.stop - turn.covers[0])
        flat_slice.param.data = self._placeholders.of(flat_slice.param.shape, flat_slice.param.dtype)
        own = self._state.get(flat_slice.param, {})
        for key, tensor in state.items():
            if key in own:
                place, value = tensor[part], own[key]
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
                own[key] = self._placeholders.of(value.shape, value.dtype)
