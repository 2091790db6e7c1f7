"""Integers only: which rank updates which range of a parameter that may not be cut just anywhere."""

from hf_zero.optim.grain import Grain
from hf_zero.sharding.layout import Layout


def owners(parameters: list[tuple[Layout, int]]) -> list[int]:
    """Gives every parameter to one rank, so that all ranks update about equally many elements.

    The largest first, each to the rank with the fewest elements so far; of those with equally few, to the one whose
    shard holds most of it, which then need not be sent.

    Args:
        parameters (`list[tuple[Layout, int]]`): each as a layout and the index of the parameter there.

    Returns:
        `list[int]`: the rank of each.
    """
    found = [0] * len(parameters)
    loads = [0] * (parameters[0][0].num_ranks if parameters else 0)
    sizes = [layout.places[index].numel for layout, index in parameters]
    for position in sorted(range(len(parameters)), key=lambda position: -sizes[position]):
        layout, index = parameters[position]
        rank = min(range(len(loads)), key=lambda rank: (loads[rank], -_held(layout, index, rank)))
        found[position] = rank
        loads[rank] += sizes[position]
    return found


def blocks(layout: Layout, index: int, grain: Grain) -> list[tuple[int, int]]:
    """The range of a parameter that each rank updates: its shard, but for the cuts, which move to block boundaries.

    A parameter that is no multiple of the block, or too small for two pieces, goes to one rank as a whole.

    Args:
        layout (`Layout`): of the buffer that it lies in.
        index (`int`): which parameter.
        grain (`Grain`): where it may be cut.

    Returns:
        `list[tuple[int, int]]`: by rank, [start, stop) in the buffer; empty where they are equal.
    """
    place = layout.places[index]
    cuts = [0]
    for rank in range(layout.num_ranks - 1):
        wanted = min(max(layout.owned(rank)[1] - place.offset, 0), place.numel)
        cuts.append(_allowed(wanted, cuts[-1], place.numel, grain))
    cuts.append(place.numel)
    return [(place.offset + low, place.offset + high) for low, high in zip(cuts, cuts[1:])]


def _allowed(wanted: int, last: int, numel: int, grain: Grain) -> int:
    """The cut nearest to the one that is wanted, after the last one."""
    block = grain.block if numel % grain.block == 0 else numel
    cut = max(last, (wanted + block // 2) // block * block)
    if cut - last < grain.min_numel:
        cut = last
    if numel - cut < grain.min_numel:
        cut = numel if cut > last or 2 * wanted > numel else last
    return cut


def _held(layout: Layout, index: int, rank: int) -> int:
    """How many elements of a parameter a rank's shard holds."""
    start, stop = layout.owned(rank)
    place = layout.places[index]
    return max(0, min(stop, place.stop) - max(start, place.offset))
