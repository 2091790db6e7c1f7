"""Where parameters lie in a flat buffer, flat buffers in a slot, and which ranges ranks own and update."""

import random
from functools import partial
from math import prod

import pytest
import torch

from hf_zero.optim.exchange import UpdateRanges, owners
from hf_zero.optim.granularity import PARAMETER, ShardGranularity
from hf_zero.sharding.layout import ALIGN_NUMEL, Layout, Range
from hf_zero.sharding.slots import Slot, parts_nbytes
from tests.comm.test_many_ranks import num_calls


pytestmark = pytest.mark.quick


def _random_shapes(rng: random.Random) -> list[tuple[int, ...]]:
    return [
        tuple(rng.choice([0, 1, 1, 2, 3, 17, 40]) for _ in range(rng.randrange(4))) for _ in range(rng.randrange(9))
    ]


CASES = [
    ([(5, 7), (3,), (), (64, 2)], 2),
    ([(1,)], 5),
    ([()], 3),
    ([(0, 4), (2,)], 2),
    ([(0,)], 4),
    ([], 3),
    *((_random_shapes(random.Random(seed)), 1 + seed % 5) for seed in range(40)),
]


def _tile(ranges: list[Range], numel: int) -> bool:
    """Whether the ranges, apart from empty ones, cover [0, numel) without overlap, in this order."""
    ends = [0, *(stop for start, stop in ranges if start < stop)]
    return [start for start, stop in ranges if start < stop] == ends[:-1] and ends[-1] == numel


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_parameters_and_pads_tile_the_buffer_and_so_do_the_parts_of_ranks(num_replicas):
    for shapes, num_ranks in CASES:
        layout = Layout.of(shapes, num_ranks, num_replicas)
        assert [(span.shape, span.numel) for span in layout.spans] == [(shape, prod(shape)) for shape in shapes]
        spans = [(span.offset, span.stop) for span in layout.spans]
        assert _tile(sorted([*spans, *layout.pads()]), layout.full_numel)
        parts = [layout.part(rank, replica) for rank in range(num_ranks) for replica in range(num_replicas)]
        assert _tile(parts, layout.full_numel) and len({stop - start for start, stop in parts}) == 1
        starts, stops = parts[::num_replicas], parts[num_replicas - 1 :: num_replicas]
        owned = [layout.owned(rank) for rank in range(num_ranks)]
        assert owned == [(start, stop) for (start, _), (_, stop) in zip(starts, stops, strict=True)]
        assert all(start % ALIGN_NUMEL == 0 for start, _ in [*spans, *parts])
        ends = [0] * len(shapes)
        for start, stop in parts:
            for piece in layout.param_slices(start, stop):
                assert piece.start == ends[piece.index] and piece.offset + piece.numel <= stop - start
                assert start + piece.offset == layout.spans[piece.index].offset + piece.start
                ends[piece.index] += piece.numel
        assert ends == [prod(shape) for shape in shapes]
        # less than one alignment after each parameter, and less than one for each part, which is rounded up
        padding = layout.full_numel - sum(ends)
        assert padding < ALIGN_NUMEL * (len(shapes) + num_ranks * num_replicas) + (not shapes)


# Views of several dtypes in one slot


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@pytest.mark.parametrize("seed", range(10))
def test_views_are_aligned_apart_and_fill_what_was_counted(seed):
    rng = random.Random(seed)
    parts = [(rng.randrange(200), rng.choice(DTYPES)) for _ in range(rng.randrange(1, 6))]
    slot = Slot(torch.empty(parts_nbytes(parts), dtype=torch.uint8))
    views = slot.views(parts)
    assert [(view.numel(), view.dtype) for view in views] == parts
    for number, view in enumerate(views):
        view.fill_(number + 1)
        if view.numel():
            assert view.untyped_storage().data_ptr() == slot.buffer.untyped_storage().data_ptr()
            assert (view.data_ptr() - slot.buffer.data_ptr()) % 64 == 0
    for number, view in enumerate(views):
        assert (view == number + 1).all(), "a later view overwrote it"
    # each part is rounded up to 64 bytes
    assert parts_nbytes(parts) - sum(numel * dtype.itemsize for numel, dtype in parts) < 64 * len(parts)


# Who updates which range: integers that every rank works out for itself


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


def _plan(num_ranks: int, granularity: ShardGranularity) -> None:
    """What one rank works out."""
    layout, rank = Layout.of([(256, 4096), (4096, 1024), (4096,)], num_ranks), num_ranks // 2
    for index, owner in enumerate(owners([(layout, index) for index in range(3)])):
        division = UpdateRanges(layout, index, granularity, owner if granularity is PARAMETER else None)
        division.range_of(rank)
        low, high = layout.spans[index].offset, layout.spans[index].stop
        start, stop = max(low, layout.owned(rank)[0]), min(high, layout.owned(rank)[1])
        list(division.pieces(start, stop) if start < stop else ())


@pytest.mark.parametrize("granularity", [PARAMETER, ShardGranularity(256, 4096)], ids=["whole", "blocks"])
def test_planning_costs_the_same_with_however_many_ranks(granularity):
    # a binary search over the ranks takes more steps of them, one for each doubling
    few, many = (num_calls(partial(_plan, num_ranks, granularity)) for num_ranks in (8, 4096))
    assert many < 2 * few + 100
