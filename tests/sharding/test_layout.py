"""Where parameters lie in a flat buffer, and which ranges ranks own."""

import random
from math import prod

import pytest

from hf_zero.sharding.layout import ALIGN_NUMEL, Layout, align


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
LAYOUTS = [(Layout.of(shapes, num_ranks), shapes, num_ranks) for shapes, num_ranks in CASES]


def test_parameters_lie_whole_aligned_and_apart():
    for layout, shapes, _num_ranks in LAYOUTS:
        end = 0
        for shape, span in zip(shapes, layout.spans, strict=True):
            assert (span.shape, span.numel) == (shape, prod(shape))
            assert span.offset % ALIGN_NUMEL == 0
            assert span.offset >= end
            end = span.stop
        assert end <= layout.full_numel


def test_ranks_own_equal_aligned_ranges_that_tile_the_buffer():
    for layout, _shapes, num_ranks in LAYOUTS:
        ranges = [layout.owned(rank) for rank in range(num_ranks)]
        assert [start for start, _ in ranges] == [rank * layout.shard_numel for rank in range(num_ranks)]
        assert ranges[-1][1] == layout.full_numel
        assert layout.shard_numel % ALIGN_NUMEL == 0


def test_parts_of_the_replicas_are_the_shards_of_all_ranks_together():
    for layout, shapes, num_ranks in LAYOUTS:
        for num_replicas in (1, 2, 3):
            layout, wanted = Layout.of(shapes, num_ranks, num_replicas), Layout.of(shapes, num_ranks * num_replicas)
            assert layout.full_numel == wanted.full_numel
            parts = [layout.part(rank, replica) for rank in range(num_ranks) for replica in range(num_replicas)]
            assert parts == [wanted.owned(rank) for rank in range(num_ranks * num_replicas)]
            for rank in range(num_ranks):
                own = parts[rank * num_replicas : (rank + 1) * num_replicas]
                assert layout.owned(rank) == (own[0][0], own[-1][1])


def test_pieces_of_all_ranks_tile_every_parameter_once():
    for layout, shapes, num_ranks in LAYOUTS:
        seen = [[0] * prod(shape) for shape in shapes]
        for rank in range(num_ranks):
            start, stop = layout.owned(rank)
            for param_slice in layout.param_slices(start, stop):
                assert start + param_slice.offset == layout.spans[param_slice.index].offset + param_slice.start
                assert param_slice.offset + param_slice.numel <= stop - start
                for element in range(param_slice.start, param_slice.start + param_slice.numel):
                    seen[param_slice.index][element] += 1
        assert all(count == 1 for counts in seen for count in counts)


def test_pads_and_parameters_tile_the_buffer():
    for layout, _shapes, _num_ranks in LAYOUTS:
        taken = [0] * layout.full_numel
        for start, stop in [*layout.pads(), *((span.offset, span.stop) for span in layout.spans)]:
            for element in range(start, stop):
                taken[element] += 1
        assert taken == [1] * layout.full_numel


def test_padding_is_bounded_by_the_alignment():
    for layout, shapes, num_ranks in LAYOUTS:
        used = sum(map(prod, shapes))
        # less than one alignment after each parameter, and less than one for each rank's range, which is rounded up
        assert layout.full_numel - used < ALIGN_NUMEL * (len(shapes) + num_ranks) + (not shapes)


def test_align_rounds_up():
    assert [align(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    assert align(5, to=4) == 8
