"""Optimizers that are not elementwise: one rank updates each parameter, or each block of one, also where it does not
hold it. Its gradients and values come there, and its new values go back.

Which rank updates which range follows from integer division, and costs the same however many ranks there are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.config import Residency
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.optim.flat_slices import FlatSlice, group_of
from hf_zero.optim.granularity import PARAMETER, ShardGranularity
from hf_zero.sharding.layout import Layout, ParamSpan, Range


@dataclass(frozen=True)
class UpdateRanges:
    """The ranges of a parameter that ranks update, which end at block boundaries: each rank updates its shard, whose
    ends move to the nearest.

    Where shards are so small that pieces would be shorter than allowed, the last of every few neighbouring ranks
    updates what all of them hold. A parameter that is no multiple of the block, or too small for two pieces, is
    updated by one rank as a whole. `index`: which parameter, which has elements; `owner`: the rank that updates all of
    it, where that is known beforehand."""

    layout: Layout
    index: int
    granularity: ShardGranularity
    owner: int | None = None

    @cached_property
    def span(self) -> ParamSpan:
        return self.layout.spans[self.index]

    @cached_property
    def _updaters(self) -> range:
        """The ranks among which those are that update something."""
        if self.owner is not None:
            return range(self.owner, self.owner + 1)
        return self.layout.owners_of(self.span.offset, self.span.stop)

    @cached_property
    def _is_cut(self) -> bool:
        numel, granularity = self.span.numel, self.granularity
        return numel % granularity.block == 0 and numel >= 2 * granularity.min_numel

    @cached_property
    def _num_joined(self) -> int:
        """Of how many neighbouring ranks the last updates what all of them hold."""
        needed = self.granularity.min_numel + self.granularity.block  # either end may move by half a block
        return -(-needed // self.layout.shard_numel) if self._is_cut else 1

    def _stop(self, rank: int) -> int:
        """Returns how much of the parameter the ranks up to this one update."""
        numel = self.span.numel
        if rank not in self._updaters[:-1]:
            return numel if rank in self._updaters else 0
        joined = (rank + 1) // self._num_joined * self._num_joined  # where the last complete group of ranks ends
        wanted = min(max(0, joined * self.layout.shard_numel - self.span.offset), numel)
        block = self.granularity.block if self._is_cut else numel
        cut = (wanted + block // 2) // block * block
        if self._is_cut and cut < self.granularity.min_numel:
            return 0
        return numel if self._is_cut and numel - cut < self.granularity.min_numel else cut

    def range_of(self, rank: int) -> Range | None:
        """Returns the range [start, stop) of the buffer that a rank updates; `None` where that is nothing."""
        start, stop = self._stop(rank - 1), self._stop(rank)
        return (self.span.offset + start, self.span.offset + stop) if start < stop else None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Range]]:
        """Yields the ranks that update something of the range [start, stop) of the parameter, each with what it
        updates of it, in rank order."""
        while start < stop:
            rank = self._updaters[bisect_right(self._updaters, start - self.span.offset, key=self._stop)]
            end = min(stop, self.span.offset + self._stop(rank))
            yield rank, (start, end)
            start = end


def owners(parameters: list[tuple[Layout, int]]) -> list[int]:
    """Assigns every parameter to one rank, so that all ranks update about equally many elements.

    The largest first, each to the rank with the fewest elements so far; of those with equally few, to the one whose
    shard holds most of it, which then need not be sent.

    Each parameter is given as a layout and its index there, and has elements. Returns the rank of each.
    """
    found = [0] * len(parameters)
    least = list(range(parameters[0][0].num_ranks if parameters else 0))  # the ranks with the fewest elements, sorted
    load = 0  # so many each
    others: list[tuple[int, int]] = []  # the other ranks, as a heap of (elements, rank)
    sizes = [layout.spans[index].numel for layout, index in parameters]
    for position in sorted(range(len(parameters)), key=lambda position: -sizes[position]):
        if not least:
            load = others[0][0]
            while others and others[0][0] == load:
                least.append(heappop(others)[1])
        layout, index = parameters[position]
        holders = layout.owners_of(layout.spans[index].offset, layout.spans[index].stop)
        # all holders but the first and the last hold equally much, and no less than those
        first = bisect_left(least, holders.start)
        nearest = [rank for rank in least[first : first + 2] if rank in holders]
        rank = max(nearest, key=lambda each: (_held(layout, index, each), -each), default=least[0])
        found[position] = rank
        del least[bisect_left(least, rank)]
        heappush(others, (load + sizes[position], rank))
    return found


def _held(layout: Layout, index: int, rank: int) -> int:
    """Counts the elements of a parameter that a rank's shard holds."""
    start, stop = layout.owned(rank)
    span = layout.spans[index]
    return max(0, min(stop, span.stop) - max(start, span.offset))


@dataclass(frozen=True, eq=False)
class ParamPartition:
    """A parameter that may not be cut just anywhere, and the range of it that each rank updates."""

    unit: Unit
    gradient: Gradient
    group: int
    ranges: UpdateRanges

    def flat_slice(self, rank: int) -> FlatSlice | None:
        """Returns the slice that a rank updates; `None` where that is nothing."""
        ranges, own = self.ranges, self.ranges.range_of(rank)
        if own is None:
            return None
        shape = ranges.span.shape if ranges.granularity == PARAMETER else None
        return FlatSlice.of(self.unit, self.gradient, *own, self.group, shape)


def make_partitions(engine: ZeroEngine, optimizer, granularities: list[ShardGranularity]) -> list[ParamPartition]:
    """Divides the parameters that an optimizer does not update by elements over the ranks. The result is the same on
    all ranks."""
    by_param, found = group_of(optimizer), []
    for unit in engine.units:
        for gradient in unit.gradients:
            for index, param in enumerate(gradient.flat.params):
                group = by_param.get(id(param), -1)
                if group >= 0 and not granularities[group].is_elementwise and param.numel():
                    found.append((unit, gradient, index, group))
    whole = [(g.flat.layout, index) for _, g, index, group in found if granularities[group] == PARAMETER]
    owner, rank = iter(owners(whole)), engine.comm.shard_group.rank
    partitions = []
    for unit, gradient, index, group in found:
        updater = next(owner) if granularities[group] == PARAMETER else None
        if gradient.flat.placement.masters is Residency.REPLICATED:
            updater = rank  # every rank updates all, and what others do is not asked
        ranges = UpdateRanges(gradient.flat.layout, index, granularities[group], updater)
        partitions.append(ParamPartition(unit, gradient, group, ranges))
    return partitions


@dataclass(frozen=True)
class Move:
    """A range of a parameter that one rank holds and another updates, seen from one of the two."""

    partition: ParamPartition
    start: int
    stop: int
    other: int
    is_held: bool  # by this rank; else it updates the range


@dataclass(frozen=True)
class BorrowedSlice:
    """A slice of another rank's shard while its gradient and values, 1-D, are on this rank."""

    flat_slice: FlatSlice
    grad: Tensor
    values: Tensor


class Exchange:
    """Moves ranges of one optimizer's parameters between ranks, one unit at a time.

    Each rank knows the moves that it takes part in, and makes those of a unit at once, in an order that is the same on
    both sides of each. `comm`: the shard group; `slices`: what this rank updates of them."""

    def __init__(self, comm: Comm, partitions: list[ParamPartition], slices: list[FlatSlice]):
        self._comm = comm
        # a backend of the device's own knows no memory of the host
        self._host_comm = (
            comm.side_group("update") if any(partition.unit.is_away for partition in partitions) else comm
        )
        self._moves: dict[Unit, list[Move]] = {partition.unit: [] for partition in partitions}
        for partition in partitions:
            self._moves[partition.unit] += _moves(partition, comm.rank)
        self._to_borrow: dict[Unit, list[FlatSlice]] = {}
        for flat_slice in slices:
            if not flat_slice.is_held:
                self._to_borrow.setdefault(flat_slice.unit, []).append(flat_slice)
        self._borrowed: dict[tuple[Gradient, int], BorrowedSlice] = {}  # while they last

    @property
    def units(self) -> list[Unit]:
        """The units with parameters that any rank updates."""
        return list(self._moves)

    @contextmanager
    def borrowed(self, unit: Unit) -> Iterator[None]:
        """Brings what this rank updates of a unit and does not hold, and at the end sends the new values to the ranks
        that hold them."""
        try:
            self._borrow(unit)
            yield
            self._give_back(unit)
        finally:
            self._release()

    def _borrow(self, unit: Unit) -> None:
        """Receives gradients and values of the unit's slices that this rank updates and does not hold."""
        self._borrowed = {
            (flat_slice.gradient, flat_slice.indices[0]): _borrow(flat_slice)
            for flat_slice in self._to_borrow.get(unit, ())
            if flat_slice.gradient.used[flat_slice.indices[0]]
        }
        self._exchange(unit, back=False)
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = borrowed.values.view(param.shape)
            param.grad = borrowed.grad.view(param.shape).to(param.dtype)

    def _give_back(self, unit: Unit) -> None:
        self._exchange(unit, back=True)
        for borrowed in self._borrowed.values():
            flat_slice, own = borrowed.flat_slice, _own_part(borrowed.flat_slice)
            if own is not None:
                _within(flat_slice.flat.master, own, flat_slice.flat.held[0]).copy_(
                    _within(borrowed.values, own, flat_slice.start)
                )

    def _release(self) -> None:
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = param.new_empty(1).expand(param.shape)
            param.grad = None
        self._borrowed = {}

    def _exchange(self, unit: Unit, *, back: bool) -> None:
        """Makes a unit's moves: gradients, and values that not every rank can read, to those who update them; new
        values `back`."""
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for move in self._moves[unit]:
            gradient, index = move.partition.gradient, move.partition.ranges.index
            if not gradient.used[index]:  # all ranks agree on these
                continue
            flat = gradient.flat
            if move.is_held:
                grad, values = (gradient.owned_range(), flat.owned[0]), (flat.master, flat.held[0])
            else:
                borrowed = self._borrowed[gradient, index]
                start = borrowed.flat_slice.start
                grad, values = (borrowed.grad, start), (borrowed.values, start)
            moved = [values] if back else [grad] if _is_at_hand(flat) else [grad, values]
            goes = sends if move.is_held != back else receives  # who holds a range sends first, and receives back
            goes += [(_within(tensor, (move.start, move.stop), first), move.other) for tensor, first in moved]
        comm = self._host_comm if unit.is_away else self._comm
        comm.exchange(sends, receives, what=unit.name).wait()


def _moves(partition: ParamPartition, rank: int) -> Iterator[Move]:
    """Yields the moves of a parameter that a rank takes part in: what it updates and others hold, and what it holds
    and others update."""
    layout = partition.gradient.flat.layout
    if partition.gradient.flat.placement.masters is Residency.REPLICATED:
        return
    start, stop = partition.ranges.range_of(rank) or (0, 0)
    for holder in layout.owners_of(start, stop):
        if holder != rank:
            low, high = layout.owned(holder)
            yield Move(partition, max(start, low), min(stop, high), holder, is_held=False)
    span, (low, high) = partition.ranges.span, layout.owned(rank)
    start, stop = max(span.offset, low), min(span.stop, high)
    for updater, piece in partition.ranges.pieces(start, stop) if start < stop else ():
        if updater != rank:
            yield Move(partition, *piece, updater, is_held=True)


def _borrow(flat_slice: FlatSlice) -> BorrowedSlice:
    """Allocates memory for a slice, and fills in the part that this rank holds."""
    flat, numel = flat_slice.flat, flat_slice.stop - flat_slice.start
    grad = torch.empty(numel, dtype=flat_slice.gradient.dtype, device=flat.master.device)
    values = torch.empty(numel, dtype=flat.master.dtype, device=flat.master.device)
    if _is_at_hand(flat):
        values.copy_(flat.full[flat_slice.start : flat_slice.stop])
    own = _own_part(flat_slice)
    if own is not None:
        _within(grad, own, flat_slice.start).copy_(_within(flat_slice.gradient.owned_range(), own, flat.owned[0]))
        _within(values, own, flat_slice.start).copy_(_within(flat.master, own, flat.held[0]))
    return BorrowedSlice(flat_slice, grad, values)


def _own_part(flat_slice: FlatSlice) -> Range | None:
    """Returns the range of a slice that this rank holds; `None` where that is nothing."""
    low, high = max(flat_slice.start, flat_slice.flat.held[0]), min(flat_slice.stop, flat_slice.flat.held[1])
    return (low, high) if low < high else None


def _within(tensor: Tensor, covers: Range, first: int) -> Tensor:
    """Returns a range of the buffer from a tensor that begins at its element `first`."""
    return tensor[covers[0] - first : covers[1] - first]


def _is_at_hand(flat: Flat) -> bool:
    """Whether every rank can read all masters where they lie, since they are the compute copies or in shared
    memory."""
    return flat.rest.whole is not None and not flat.rest.has_copy
