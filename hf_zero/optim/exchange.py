"""Optimizers that are not elementwise: one rank updates each parameter, or each block of a parameter, even if it does
not hold it. It receives the gradients and values and sends the new values back.

The ranges that ranks update are computed by integer division, at a cost independent of the number of ranks.
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
    """The ranges of a parameter that ranks update. Each rank updates its shard, rounded to the nearest block
    boundaries.

    If shards are too small for the minimum size of a piece, the last of several neighboring ranks updates the shards
    of all of them. A parameter whose size is not a multiple of the block, or that is too small for two pieces, is
    updated by one rank.

    Args:
        layout (`Layout`): the layout of the flat buffer.
        index (`int`): the index of the parameter, which must not be empty.
        granularity (`ShardGranularity`): the sizes into which it may be split.
        owner (`int`, *optional*): the rank that updates the full parameter, if already assigned.
    """

    layout: Layout
    index: int
    granularity: ShardGranularity
    owner: int | None = None

    @cached_property
    def span(self) -> ParamSpan:
        return self.layout.spans[self.index]

    @cached_property
    def _updaters(self) -> range:
        """A range of ranks that contains all ranks that update the parameter."""
        if self.owner is not None:
            return range(self.owner, self.owner + 1)
        return self.layout.owners_of(self.span.offset, self.span.stop)

    @cached_property
    def _is_cut(self) -> bool:
        numel, granularity = self.span.numel, self.granularity
        return numel % granularity.block == 0 and numel >= 2 * granularity.min_numel

    @cached_property
    def _num_joined(self) -> int:
        """The number of neighboring ranks whose shards are updated by the last of them."""
        needed = self.granularity.min_numel + self.granularity.block  # each end may move by half a block
        return -(-needed // self.layout.shard_numel) if self._is_cut else 1

    def _stop(self, rank: int) -> int:
        """Returns the number of elements that ranks up to and including this one update."""
        numel = self.span.numel
        if rank not in self._updaters[:-1]:
            return numel if rank in self._updaters else 0
        joined = (rank + 1) // self._num_joined * self._num_joined  # the end of the last complete group of ranks
        wanted = min(max(0, joined * self.layout.shard_numel - self.span.offset), numel)
        block = self.granularity.block if self._is_cut else numel
        cut = (wanted + block // 2) // block * block
        if self._is_cut and cut < self.granularity.min_numel:
            return 0
        return numel if self._is_cut and numel - cut < self.granularity.min_numel else cut

    def range_of(self, rank: int) -> Range | None:
        """Returns the range [start, stop) of the buffer that a rank updates, or `None` if it is empty."""
        start, stop = self._stop(rank - 1), self._stop(rank)
        return (self.span.offset + start, self.span.offset + stop) if start < stop else None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Range]]:
        """Yields the ranks that update elements of the range [start, stop) of the buffer, each with the part that it
        updates, in rank order."""
        while start < stop:
            rank = self._updaters[bisect_right(self._updaters, start - self.span.offset, key=self._stop)]
            end = min(stop, self.span.offset + self._stop(rank))
            yield rank, (start, end)
            start = end


def owners(parameters: list[tuple[Layout, int]]) -> list[int]:
    """Assigns every parameter to a rank such that all ranks update about the same number of elements.

    Parameters are assigned in order of decreasing size to the rank with the fewest elements so far. Among several such
    ranks, the one whose shard holds most of the parameter is chosen, because its part need not be sent.

    Args:
        parameters (`list`): the layout of each parameter and its index there. Parameters must not be empty.

    Returns:
        The rank of each parameter.
    """
    found = [0] * len(parameters)
    least = list(range(parameters[0][0].num_ranks if parameters else 0))  # the ranks with the fewest elements, sorted
    load = 0  # the number of their elements
    others: list[tuple[int, int]] = []  # the other ranks, as a heap of (elements, rank)
    sizes = [layout.spans[index].numel for layout, index in parameters]
    for position in sorted(range(len(parameters)), key=lambda position: -sizes[position]):
        if not least:
            load = others[0][0]
            while others and others[0][0] == load:
                least.append(heappop(others)[1])
        layout, index = parameters[position]
        holders = layout.owners_of(layout.spans[index].offset, layout.spans[index].stop)
        # all holders except the first and the last hold the same number of elements, at least as many as those two
        first = bisect_left(least, holders.start)
        nearest = [rank for rank in least[first : first + 2] if rank in holders]
        rank = max(nearest, key=lambda each: (_held(layout, index, each), -each), default=least[0])
        found[position] = rank
        del least[bisect_left(least, rank)]
        heappush(others, (load + sizes[position], rank))
    return found


def _held(layout: Layout, index: int, rank: int) -> int:
    """Returns the number of elements of a parameter in a rank's shard."""
    start, stop = layout.owned(rank)
    span = layout.spans[index]
    return max(0, min(stop, span.stop) - max(start, span.offset))


@dataclass(frozen=True, eq=False)
class ParamPartition:
    """A parameter with restrictions on splitting, and the ranges of it that ranks update."""

    unit: Unit
    gradient: Gradient
    group: int
    ranges: UpdateRanges

    def flat_slice(self, rank: int) -> FlatSlice | None:
        """Returns the slice that a rank updates, or `None` if it is empty."""
        ranges, own = self.ranges, self.ranges.range_of(rank)
        if own is None:
            return None
        shape = ranges.span.shape if ranges.granularity == PARAMETER else None
        return FlatSlice.of(self.unit, self.gradient, *own, self.group, shape)


def make_partitions(engine: ZeroEngine, optimizer, granularities: list[ShardGranularity]) -> list[ParamPartition]:
    """Distributes the parameters of optimizers that are not elementwise over the ranks. The result is the same on all
    ranks."""
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
            updater = rank  # every rank updates everything
        ranges = UpdateRanges(gradient.flat.layout, index, granularities[group], updater)
        partitions.append(ParamPartition(unit, gradient, group, ranges))
    return partitions


@dataclass(frozen=True)
class Move:
    """A range of a parameter that one rank holds and another updates, from the point of view of one of them."""

    partition: ParamPartition
    start: int
    stop: int
    other: int
    is_held: bool  # whether this rank holds the range; otherwise it updates it


@dataclass(frozen=True)
class BorrowedSlice:
    """A slice of another rank's shard while its gradient and values (1-D) are on this rank."""

    flat_slice: FlatSlice
    grad: Tensor
    values: Tensor


class Exchange:
    """Moves ranges of one optimizer's parameters between ranks, one unit at a time.

    Each rank knows the moves that it takes part in and executes all moves of a unit at once, in an order that is the
    same on both sides of each move. `comm` is the shard group; `slices` are the slices that this rank updates."""

    def __init__(self, comm: Comm, partitions: list[ParamPartition], slices: list[FlatSlice]):
        self._comm = comm
        # backends of devices do not support host memory
        self._host_comm = (
            comm.side_group("update") if any(partition.unit.is_offloaded for partition in partitions) else comm
        )
        self._moves: dict[Unit, list[Move]] = {partition.unit: [] for partition in partitions}
        for partition in partitions:
            self._moves[partition.unit] += _moves(partition, comm.rank)
        self._to_borrow: dict[Unit, list[FlatSlice]] = {}
        for flat_slice in slices:
            if not flat_slice.is_held:
                self._to_borrow.setdefault(flat_slice.unit, []).append(flat_slice)
        self._borrowed: dict[tuple[Gradient, int], BorrowedSlice] = {}  # those of the current unit

    @property
    def units(self) -> list[Unit]:
        """The units with parameters of this optimizer."""
        return list(self._moves)

    @contextmanager
    def borrowed(self, unit: Unit) -> Iterator[None]:
        """Fetches the slices of a unit that this rank updates but does not hold. At the end, sends the new values to
        the ranks that hold them."""
        try:
            self._borrow(unit)
            yield
            self._give_back(unit)
        finally:
            self._release()

    def _borrow(self, unit: Unit) -> None:
        """Receives gradients and values of the unit's slices that this rank updates but does not hold."""
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
                _within(flat_slice.flat.masters.values, own, flat_slice.flat.masters.covers[0]).copy_(
                    _within(borrowed.values, own, flat_slice.start)
                )

    def _release(self) -> None:
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = param.new_empty(1).expand(param.shape)
            param.grad = None
        self._borrowed = {}

    def _exchange(self, unit: Unit, *, back: bool) -> None:
        """Executes a unit's moves: gradients, and values that the updating rank cannot read, to the rank that updates
        them; with `back`, new values to the rank that holds them."""
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for move in self._moves[unit]:
            gradient, index = move.partition.gradient, move.partition.ranges.index
            if not gradient.used[index]:  # the same on all ranks
                continue
            flat = gradient.flat
            if move.is_held:
                grad, values = (gradient.owned_range(), flat.owned[0]), (flat.masters.values, flat.masters.covers[0])
            else:
                borrowed = self._borrowed[gradient, index]
                start = borrowed.flat_slice.start
                grad, values = (borrowed.grad, start), (borrowed.values, start)
            moved = [values] if back else [grad] if _is_at_hand(flat) else [grad, values]
            goes = sends if move.is_held != back else receives  # the holder sends first, and receives with `back`
            goes += [(_within(tensor, (move.start, move.stop), first), move.other) for tensor, first in moved]
        comm = self._host_comm if unit.is_offloaded else self._comm
        comm.exchange(sends, receives, what=unit.name).wait()


def _moves(partition: ParamPartition, rank: int) -> Iterator[Move]:
    """Yields the moves of a parameter that a rank takes part in: ranges that it updates and others hold, and ranges
    that it holds and others update."""
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
    """Allocates memory for a slice and fills in the part that this rank holds."""
    flat, numel = flat_slice.flat, flat_slice.stop - flat_slice.start
    grad = torch.empty(numel, dtype=flat_slice.gradient.dtype, device=flat.masters.values.device)
    values = torch.empty(numel, dtype=flat.masters.dtype, device=flat.masters.values.device)
    if _is_at_hand(flat):
        values.copy_(flat.full[flat_slice.start : flat_slice.stop])
    own = _own_part(flat_slice)
    if own is not None:
        _within(grad, own, flat_slice.start).copy_(_within(flat_slice.gradient.owned_range(), own, flat.owned[0]))
        _within(values, own, flat_slice.start).copy_(_within(flat.masters.values, own, flat.masters.covers[0]))
    return BorrowedSlice(flat_slice, grad, values)


def _own_part(flat_slice: FlatSlice) -> Range | None:
    """Returns the range of a slice that this rank holds, or `None` if it is empty."""
    start, stop = flat_slice.flat.masters.covers
    low, high = max(flat_slice.start, start), min(flat_slice.stop, stop)
    return (low, high) if low < high else None


def _within(tensor: Tensor, covers: Range, first: int) -> Tensor:
    """Returns a range of the buffer from a tensor that starts at the buffer's element `first`."""
    return tensor[covers[0] - first : covers[1] - first]


def _is_at_hand(flat: Flat) -> bool:
    """Whether every rank can read all masters directly, because they are also the compute copies or are in shared
    memory."""
    return flat.whole is not None and not flat.has_copy
