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
from torch import Tensor, nn

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
class Undivided:
    """The division of a parameter that one rank updates alone."""

    span: ParamSpan
    owner: int

    def range_of(self, rank: int) -> Range | None:
        """Returns the range [start, stop) of the buffer that a rank updates; `None` where that is nothing."""
        return (self.span.offset, self.span.stop) if rank == self.owner else None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Range]]:
        """Yields the ranks that update something of the range [start, stop) of the parameter, each with what it
        updates of it, in rank order."""
        yield self.owner, (start, stop)


@dataclass(frozen=True)
class Blocks:
    """The division of a parameter at block boundaries: each rank updates its shard, whose ends move to the nearest.

    Where shards are so small that pieces would be shorter than allowed, the last of every few neighbouring ranks
    updates what all of them hold. A parameter that is no multiple of the block, or too small for two pieces, is
    updated by one rank as a whole. `index`: which parameter. It has elements."""

    layout: Layout
    index: int
    granularity: ShardGranularity

    @cached_property
    def _span(self) -> ParamSpan:
        return self.layout.spans[self.index]

    @cached_property
    def _holders(self) -> range:
        return self.layout.owners_of(self._span.offset, self._span.stop)

    @cached_property
    def _is_cut(self) -> bool:
        numel, granularity = self._span.numel, self.granularity
        return numel % granularity.block == 0 and numel >= 2 * granularity.min_numel

    @cached_property
    def _num_joined(self) -> int:
        """Of how many neighbouring ranks the last updates what all of them hold."""
        needed = self.granularity.min_numel + self.granularity.block  # either end may move by half a block
        return -(-needed // self.layout.shard_numel) if self._is_cut else 1

    def _stop(self, rank: int) -> int:
        """Returns how much of the parameter the ranks up to this one update."""
        numel = self._span.numel
        if rank not in self._holders[:-1]:
            return numel if rank in self._holders else 0
        joined = (rank + 1) // self._num_joined * self._num_joined  # where the last complete group of ranks ends
        wanted = min(max(0, joined * self.layout.shard_numel - self._span.offset), numel)
        block = self.granularity.block if self._is_cut else numel
        cut = (wanted + block // 2) // block * block
        if self._is_cut and cut < self.granularity.min_numel:
            return 0
        return numel if self._is_cut and numel - cut < self.granularity.min_numel else cut

    def range_of(self, rank: int) -> Range | None:
        """Returns what `Undivided.range_of` says."""
        start, stop = self._stop(rank - 1), self._stop(rank)
        return (self._span.offset + start, self._span.offset + stop) if start < stop else None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Range]]:
        """Yields what `Undivided.pieces` says."""
        while start < stop:
            rank = self._holders[bisect_right(self._holders, start - self._span.offset, key=self._stop)]
            end = min(stop, self._span.offset + self._stop(rank))
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
    """A parameter that may not be cut just anywhere, and the range of it that each rank updates. `shape`: of the whole
    parameter, where the optimizer is to see it."""

    unit: Unit
    gradient: Gradient
    index: int
    group: int
    division: Undivided | Blocks
    shape: tuple[int, ...] | None

    def flat_slice(self, rank: int) -> FlatSlice | None:
        """Returns the slice that a rank updates; `None` where that is nothing."""
        own = self.division.range_of(rank)
        if own is None:
            return None
        start, stop = own
        flat_slice = FlatSlice(
            self.unit, self.gradient, start, stop, self.group, None, is_whole=self.shape is not None
        )
        flat, shape = flat_slice.flat, self.shape or (stop - start,)
        if flat_slice.is_held:
            values = flat.master.detach()[flat_slice.within].view(shape)
        else:
            values = torch.empty(1, dtype=flat.master.dtype, device=flat.master.device).expand(shape)
        flat_slice.param = nn.Parameter(values)
        return flat_slice


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
    return [
        ParamPartition(*each, *_divided(each[1].flat, each[2], granularities[each[3]], owner, rank)) for each in found
    ]


def _divided(flat: Flat, index: int, granularity: ShardGranularity, owner: Iterator[int], rank: int):
    """Returns which rank updates what, and the shape that the optimizer sees. Of masters that every rank has, this
    rank updates all, and what others do is not asked."""
    span, shape = flat.layout.spans[index], None
    division: Undivided | Blocks = Blocks(flat.layout, index, granularity)
    if granularity == PARAMETER:
        division, shape = Undivided(span, next(owner)), span.shape
    if flat.plan.master is Residency.REPLICATED:
        division = Undivided(span, rank)
    return division, shape


@dataclass(frozen=True)
class Move:
    """A range of a parameter that one rank holds and another updates."""

    partition: ParamPartition
    start: int
    stop: int
    holder: int
    updater: int


@dataclass(frozen=True)
class BorrowedSlice:
    """A slice of another rank's shard while its gradient and values, 1-D, are on this rank."""

    flat_slice: FlatSlice
    grad: Tensor
    values: Tensor

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start - self.flat_slice.start : stop - self.flat_slice.start]


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
        sends, receives = [], []
        for move in self._used_moves(unit):
            gradient, flat = move.partition.gradient, move.partition.gradient.flat
            if move.holder == self._comm.rank:
                sends.append((_part(gradient.owned_range(), flat.owned, move), move.updater))
                if not _is_at_hand(flat):
                    sends.append((_part(flat.master, flat.held, move), move.updater))
            elif move.updater == self._comm.rank:
                borrowed = self._borrowed[gradient, move.partition.index]
                receives.append((borrowed.part(borrowed.grad, move.start, move.stop), move.holder))
                if not _is_at_hand(flat):
                    receives.append((borrowed.part(borrowed.values, move.start, move.stop), move.holder))
        self._exchange(unit, sends, receives)
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = borrowed.values.view(param.shape)
            param.grad = borrowed.grad.view(param.shape).to(param.dtype)

    def _give_back(self, unit: Unit) -> None:
        sends, receives = [], []
        for move in self._used_moves(unit):
            flat = move.partition.gradient.flat
            if move.updater == self._comm.rank:
                borrowed = self._borrowed[move.partition.gradient, move.partition.index]
                sends.append((borrowed.part(borrowed.values, move.start, move.stop), move.holder))
            elif move.holder == self._comm.rank:
                receives.append((_part(flat.master, flat.held, move), move.updater))
        self._exchange(unit, sends, receives)
        for borrowed in self._borrowed.values():
            flat_slice, (low, high) = borrowed.flat_slice, _own_part(borrowed.flat_slice)
            if low < high:
                held = flat_slice.flat.held[0]
                flat_slice.flat.master[low - held : high - held].copy_(borrowed.part(borrowed.values, low, high))

    def _release(self) -> None:
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = param.new_empty(1).expand(param.shape)
            param.grad = None
        self._borrowed = {}

    def _exchange(self, unit: Unit, sends: list, receives: list) -> None:
        comm = self._host_comm if unit.is_away else self._comm
        comm.exchange(sends, receives, what=unit.name).wait()

    def _used_moves(self, unit: Unit) -> Iterator[Move]:
        """Yields this rank's moves of parameters that have a gradient. All ranks agree on these parameters."""
        for move in self._moves[unit]:
            if move.partition.gradient.used[move.partition.index]:
                yield move


def _moves(partition: ParamPartition, rank: int) -> Iterator[Move]:
    """Yields the moves of a parameter that a rank takes part in: what it updates and others hold, and what it holds
    and others update."""
    layout = partition.gradient.flat.layout
    if partition.gradient.flat.plan.master is Residency.REPLICATED:
        return
    start, stop = partition.division.range_of(rank) or (0, 0)
    for holder in layout.owners_of(start, stop):
        if holder != rank:
            low, high = layout.owned(holder)
            yield Move(partition, max(start, low), min(stop, high), holder, rank)
    span, (low, high) = layout.spans[partition.index], layout.owned(rank)
    start, stop = max(span.offset, low), min(span.stop, high)
    for updater, piece in partition.division.pieces(start, stop) if start < stop else ():
        if updater != rank:
            yield Move(partition, *piece, rank, updater)


def _borrow(flat_slice: FlatSlice) -> BorrowedSlice:
    """Allocates memory for a slice, and fills in the part that this rank holds."""
    flat, numel = flat_slice.flat, flat_slice.stop - flat_slice.start
    grad = torch.empty(numel, dtype=flat_slice.gradient.dtype, device=flat.master.device)
    values = torch.empty(numel, dtype=flat.master.dtype, device=flat.master.device)
    if _is_at_hand(flat):
        values.copy_(flat.full[flat_slice.start : flat_slice.stop])
    borrowed, (low, high) = BorrowedSlice(flat_slice, grad, values), _own_part(flat_slice)
    if low < high:
        borrowed.part(grad, low, high).copy_(
            flat_slice.gradient.owned_range()[low - flat.owned[0] : high - flat.owned[0]]
        )
        borrowed.part(values, low, high).copy_(flat.master[low - flat.held[0] : high - flat.held[0]])
    return borrowed


def _own_part(flat_slice: FlatSlice) -> tuple[int, int]:
    """Returns the range (start, stop) of a slice that this rank holds. It is empty unless stop is greater."""
    return max(flat_slice.start, flat_slice.flat.held[0]), min(flat_slice.stop, flat_slice.flat.held[1])


def _part(tensor: Tensor, covers: tuple[int, int], move: Move) -> Tensor:
    return tensor[move.start - covers[0] : move.stop - covers[0]]


def _is_at_hand(flat: Flat) -> bool:
    """Whether every rank can read all masters where they lie, since they are the compute copies or in shared
    memory."""
    return flat.rest.whole is not None and not flat.rest.has_copy
