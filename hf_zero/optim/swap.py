"""Masters and optimizer state that rest on disk: a few runs at a time are in memory, where they are updated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm, Pending
from hf_zero.engine.flat import Flat, Range
from hf_zero.engine.placeholder import Placeholders
from hf_zero.optim.runs import Run
from hf_zero.storage import Disk, DiskTensor, Record, windows


@dataclass(frozen=True, eq=False)
class Turn:
    """Runs that lie in one piece of a buffer, while their masters and state are in memory.

    Args:
        flat (`Flat`): the buffer.
        covers (`tuple[int, int]`): the piece, counted in the buffer.
        master (`Tensor`): its masters.
        runs (`list[Run]`): those of the runs in question that lie in it.
        uses (`list[Pending]`): what still reads `master` when the turn is over.
    """

    flat: Flat
    covers: Range
    master: Tensor
    runs: list[Run]
    uses: list[Pending] = field(default_factory=list)


class Swap:
    """Brings runs, with their state, into memory in turn. In between their tensors read as NaN.

    Args:
        disk (`Disk`): where the masters rest.
        comm (`Comm`): the ranks.
        runs (`list[Run]`): all that are updated, each within one piece of its buffer.
        state (`dict`): the optimizer's, by run's parameter. The numbers in it stay in memory.
        state_of (`Callable`): gives the dtypes of the tensors of a run's state, by key.

    Raises:
        `StorageError`: on all ranks, when the disk has no room.
    """

    def __init__(
        self,
        disk: Disk,
        comm: Comm,
        *,
        runs: list[Run],
        state: dict[nn.Parameter, dict],
        state_of: Callable[[Run], dict[str, torch.dtype]],
    ):
        self._disk = disk
        self._state = state
        self._placeholders = Placeholders(torch.device("cpu"))
        keys: dict[Flat, dict[str, torch.dtype]] = {}
        for run in runs:
            keys.setdefault(run.flat, {}).update(state_of(run))
        places = [(flat, key, dtype) for flat, own in keys.items() for key, dtype in own.items()]
        extents = disk.extents(comm, [(flat.on_disk.extent.numel, dtype) for flat, _, dtype in places])
        self._tensors: dict[Flat, dict[str, DiskTensor]] = {flat: {} for flat in keys}
        for (flat, key, _), extent in zip(places, extents):
            self._tensors[flat][key] = DiskTensor(disk, extent)
        self._order: dict[Record, Record] = {}  # what came next when it was last used
        self._last: Record | None = None
        if comm.rank == 0:
            disk.tell("masters and optimizer state")

    def walk(self, runs: Sequence[Run], *, writes: bool) -> Iterator[Turn]:
        """Runs in turn; the next ones are read, and the last ones written, while some are here.

        Args:
            runs (`Sequence[Run]`): which.
            writes (`bool`): their masters and state are written back.
        """
        turns = self._turns(runs)
        for position, (flat, covers, own) in enumerate(turns):
            following = turns[position + 1][:2] if position + 1 < len(turns) else None
            with self._here(flat, covers, own, writes=writes) as turn:
                record = self._record(flat, covers)
                ahead = self._record(*following) if following else self._order.get(record)
                if ahead is not None:
                    self._disk.prefetch(ahead)
                yield turn

    def _turns(self, runs: Sequence[Run]) -> list[tuple[Flat, Range, list[Run]]]:
        found: dict[tuple[Flat, Range], list[Run]] = {}
        for run in runs:
            first, numel = run.flat.held[0], run.flat.on_disk.extent.numel
            covers = next((first + a, first + b) for a, b in windows(numel) if first + a <= run.start < first + b)
            found.setdefault((run.flat, covers), []).append(run)
        return [(*place, own) for place, own in found.items()]

    def _record(self, flat: Flat, covers: Range) -> Record:
        start, stop = covers[0] - flat.held[0], covers[1] - flat.held[0]
        tensors = [flat.on_disk, *self._tensors[flat].values()]
        return tuple(tensor.extent.window(start, stop) for tensor in tensors)

    @contextmanager
    def _here(self, flat: Flat, covers: Range, runs: list[Run], *, writes: bool) -> Iterator[Turn]:
        record = self._record(flat, covers)
        if self._last is not None:
            self._order[self._last] = record
        self._last = record
        master, *tensors = self._disk.bring(record)
        state = dict(zip(self._tensors[flat], tensors))
        turn = Turn(flat, covers, master, runs)
        try:
            for run in runs:
                self._show(run, turn, state)
            yield turn
        finally:
            for run in runs:
                self._hide(run, turn, state)
            self._disk.take_back(record, writes=writes, uses=turn.uses)

    def _show(self, run: Run, turn: Turn, state: dict[str, Tensor]) -> None:
        part = slice(run.start - turn.covers[0], run.stop - turn.covers[0])
        run.param.data = turn.master[part]
        own = self._state.get(run.param, {})
        own.update({key: tensor[part] for key, tensor in state.items() if key in own})

    def _hide(self, run: Run, turn: Turn, state: dict[str, Tensor]) -> None:
        """State that the optimizer has made anew meanwhile, as in its first step, is taken over."""
        part = slice(run.start - turn.covers[0], run.stop - turn.covers[0])
        run.param.data = self._placeholders.of(run.param.shape, run.param.dtype)
        own = self._state.get(run.param, {})
        for key, tensor in state.items():
            if key in own:
                place, value = tensor[part], own[key]
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
                own[key] = self._placeholders.of(value.shape, value.dtype)
