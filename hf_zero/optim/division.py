"""Which rank updates which range of a parameter that may not be cut just anywhere: integers only.

A rank asks for its own range, and for the ranks that update what it holds. The answers follow from integer division,
and cost the same however many ranks there are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from hf_zero.optim.granularity import ShardGranularity
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
    updated by one rank as a whole.

    Args:
        index (`int`): which parameter. It has elements.
    """

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

    Args:
        parameters (`list[tuple[Layout, int]]`): each as a layout and the index of the parameter there. All have
            elements.

    Returns:
        `list[int]`: the rank of each.
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
