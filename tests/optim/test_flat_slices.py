"""Who updates which range: integers that every rank works out for itself."""

import random
import sys

import pytest

from hf_zero.optim.exchange import UpdateRanges, owners
from hf_zero.optim.granularity import PARAMETER, ShardGranularity
from hf_zero.sharding.layout import Layout, Range


pytestmark = pytest.mark.quick


def _model(num_ranks: int, num_layers: int = 12) -> list[Layout]:
    """The matrices of a small Llama: embeddings and head, and layer by layer."""
    layer = [(64, 64), (32, 64), (32, 64), (64, 64), (172, 64), (172, 64), (64, 172), (64,), (64,)]
    root = Layout.of([(700, 64), (700, 64), (64,)], num_ranks)
    return [root] + [Layout.of(layer, num_ranks) for _ in range(num_layers)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_owners_are_balanced_by_size(num_ranks):
    parameters = [(layout, index) for layout in _model(num_ranks) for index in range(len(layout.spans))]
    found = owners(parameters)
    loads = [0] * num_ranks
    for (layout, index), rank in zip(parameters, found, strict=True):
        loads[rank] += layout.spans[index].numel
    # whoever got the last one had the least, so that no rank is more than one parameter ahead
    assert max(loads) - min(loads) <= 700 * 64
    ideal = sum(loads) / num_ranks
    assert max(loads) <= max(1.02 * ideal, 700 * 64), f"{loads}, ideal {ideal}"
    assert found == owners(parameters), "the same on all ranks"


def test_of_equally_loaded_ranks_the_one_that_holds_most_is_the_owner():
    layout = Layout.of([(64, 64), (64, 64)], 2)
    assert owners([(layout, 0), (layout, 1)]) == [0, 1]
    assert owners([(layout, 1), (layout, 0)]) == [1, 0]


def _ranges(layout: Layout, division: UpdateRanges) -> dict[int, Range]:
    found = {rank: division.range_of(rank) for rank in range(-1, layout.num_ranks + 1)}
    return {rank: own for rank, own in found.items() if own is not None}


def test_blocks_move_cuts_to_block_boundaries_and_leave_no_piece_too_small():
    rng = random.Random(0)
    for _ in range(300):
        granularity = ShardGranularity(rng.choice([128, 256, 2048]), 4096)
        shapes = [
            (rng.choice([1, 17, 60, 64, 256]), rng.choice([1, 3, 64, 300, 768])) for _ in range(rng.randint(1, 6))
        ]
        layout = Layout.of(shapes, rng.choice([*range(1, 8), 40, 300]))
        for index, span in enumerate(layout.spans):
            found = _ranges(layout, UpdateRanges(layout, index, granularity))
            ranges = list(found.values())
            assert (ranges[0][0], ranges[-1][1]) == (span.offset, span.stop)
            assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:])), "they tile the parameter, in rank order"
            if len(ranges) > 1:
                assert all((low - span.offset) % granularity.block == 0 for low, _ in ranges)
                assert all(high - low >= granularity.min_numel for low, high in ranges)
                assert span.numel % granularity.block == 0
            else:
                assert set(found) <= set(layout.owners_of(span.offset, span.stop)), "who updates it holds some of it"


def test_a_large_parameter_is_divided_where_its_shards_are():
    layout = Layout.of([(1024, 1000), (300,)], 4)
    found = _ranges(layout, UpdateRanges(layout, 0, ShardGranularity(256, 4096)))
    assert list(found) == [0, 1, 2, 3]
    for rank, (low, high) in found.items():
        start, stop = layout.owned(rank)
        assert abs(low - start) <= 128 and abs(min(high, 1024 * 1000) - min(stop, 1024 * 1000)) <= 128


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 50, 300])
def test_who_holds_a_range_knows_who_updates_it(num_ranks):
    layout = Layout.of([(64, 300), (256, 256), (17,), (60, 64)], num_ranks)
    for index, span in enumerate(layout.spans):
        for division in (
            UpdateRanges(layout, index, ShardGranularity(256, 4096)),
            UpdateRanges(layout, index, PARAMETER, num_ranks - 1),
        ):
            ranges = _ranges(layout, division)
            for holder in range(num_ranks):
                low, high = max(span.offset, layout.owned(holder)[0]), min(span.stop, layout.owned(holder)[1])
                met = {rank: (max(low, start), min(high, stop)) for rank, (start, stop) in ranges.items()}
                expected = [(rank, own) for rank, own in met.items() if own[0] < own[1]]
                assert list(division.pieces(low, high) if low < high else ()) == expected


def _num_lines(num_ranks: int, granularity: ShardGranularity) -> int:
    """Counts the lines of Python that one rank takes to plan."""
    layout, rank, count = Layout.of([(256, 4096), (4096, 1024), (4096,)], num_ranks), num_ranks // 2, 0

    def counted(*_):
        nonlocal count
        count += 1
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        for index, owner in enumerate(owners([(layout, index) for index in range(3)])):
            division = UpdateRanges(layout, index, granularity, owner if granularity is PARAMETER else None)
            division.range_of(rank)
            low, high = layout.spans[index].offset, layout.spans[index].stop
            start, stop = max(low, layout.owned(rank)[0]), min(high, layout.owned(rank)[1])
            list(division.pieces(start, stop) if start < stop else ())
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("granularity", [PARAMETER, ShardGranularity(256, 4096)], ids=["whole", "blocks"])
def test_planning_costs_the_same_with_however_many_ranks(granularity):
    # a binary search over the ranks takes more steps of them, one for each doubling
    assert _num_lines(4096, granularity) < 2 * _num_lines(8, granularity) + 100
