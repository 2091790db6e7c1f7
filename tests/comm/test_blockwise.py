"""Values in 8 bits: how far they come back off, that every way between ranks brings the same, and how many bytes."""

import pytest
import torch

from hf_zero.comm.blockwise import BLOCK_NUMEL, HIGHEST, Packed, pack_rows, packed_nbytes, unpack_rows
from tests.comm.test_collectives import ALL, play
from tests.tiers import more


def _through(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What comes back of rows of values."""
    packed = torch.empty(values.shape[0], packed_nbytes(values.shape[1]), dtype=torch.uint8)
    pack_rows(values, packed)
    found = torch.empty(values.shape, dtype=dtype or values.dtype)
    unpack_rows(packed, found)
    return found


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """The same in other words: block by block, in fp32."""
    found = []
    for block in values.float().split(BLOCK_NUMEL):
        scale = block.abs().max() / HIGHEST
        codes = (block / scale).round() if scale else torch.zeros(block.shape)
        found.append((codes * scale).to(values.dtype))
    return torch.cat(found) if found else values


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_come_back_within_half_a_scale(dtype):
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 16, 255, 256, 257, 5000):
        magnitudes = torch.rand(3, numel, generator=generator).mul(8).sub(4).exp()
        values = (torch.randn(3, numel, generator=generator) * magnitudes).to(dtype)
        values[0, ::3] = 0
        found = _through(values)
        for row, came in zip(values, found):
            assert torch.equal(came, _rounded(row))
            for block, its in zip(row.split(BLOCK_NUMEL), came.split(BLOCK_NUMEL)):
                largest = block.abs().max().item()
                # half a scale, and half a unit in the last place of the result, which is no larger than the largest
                eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
                bound = largest / HIGHEST / 2 * (1 + 1e-5) + largest * eps / 2
                assert (its.double() - block.double()).abs().max() <= bound


@pytest.mark.quick
def test_values_at_the_edges():
    zeros = torch.zeros(1, 300)
    assert torch.equal(_through(zeros), zeros)
    tiny = torch.full((1, 256), 1e-44)
    assert _through(tiny).isfinite().all() and (_through(tiny) - tiny).abs().max() <= 2e-44
    huge = torch.full((1, 256), 3e38)
    torch.testing.assert_close(_through(huge), huge)
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(1, 600)
        values[0, 300] = bad  # in the second of three blocks
        found = _through(values)[0]
        assert found[256:512].isnan().all()
        assert torch.equal(found[:256], _rounded(torch.ones(256))) and found[512:].isfinite().all()


@pytest.mark.quick
def test_values_take_a_quarter_of_fp32():
    assert packed_nbytes(2**20) == 2**20 + 4 * 2**20 // 256
    assert packed_nbytes(1) == 260


def _gathers(comm, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    """Gathers two buffers at once, waited for in the other order, twice."""
    gather, found = Packed(comm), []
    for turn in range(2):
        wholes, pending = [], []
        for index in range(2):
            full = comm.empty(numel * comm.num_ranks, dtype).fill_(7)
            own = _values(comm.rank, numel, dtype, 2 * turn + index).to(comm.device)
            apart = own if index else full[comm.rank * numel : (comm.rank + 1) * numel].copy_(own)
            pending.append(gather.all_gather(full, apart, what=f"unit {index}"))
            wholes.append(full)
        comm.progress()
        for each in pending[::-1] if turn else pending:
            each.wait()
            each.wait()  # costs nothing
        for full in wholes:
            found.append(full.cpu().clone())
            whole = torch.cat([_values(rank, numel, dtype, len(found) - 1) for rank in range(comm.num_ranks)])
            gather.round_(whole)
            assert torch.equal(whole, found[-1])
    rows = [bucket.nbytes for bucket in comm.packing]
    assert rows == [packed_nbytes(numel) * comm.num_ranks] * 2  # they are used again
    assert set(rows) and comm.buffer_nbytes >= sum(rows)
    assert comm.counters.sent_nbytes.get("gather", 0) == 4 * packed_nbytes(numel) * (comm.num_ranks - 1)
    return found


def _values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks, dtype, numel", [(2, torch.float32, 4000), (3, torch.bfloat16, 16)])
def test_every_way_between_ranks_brings_the_same(num_ranks, dtype, numel):
    wanted = [
        torch.cat([_rounded(_values(rank, numel, dtype, seed)) for rank in range(num_ranks)]) for seed in range(4)
    ]
    for way in ALL:
        for found in play(_gathers, way, num_ranks, dtype, numel, bucket_nbytes=2**14):
            for tensor, expected in zip(found, wanted, strict=True):
                assert torch.equal(tensor, expected)


def _reductions(comm, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    """Two averages: one that overwrites, one that is added to ones."""
    packed, found, sent = Packed(comm), [], comm.counters.sent_nbytes
    before = sent.get("reduce", 0)
    for turn in range(2):
        full = comm.empty(numel * comm.num_ranks, dtype)
        full.copy_(_values(comm.rank, numel * comm.num_ranks, dtype, turn))
        out = torch.ones(numel)
        pending = packed.reduce_scatter(full, out, dtype=torch.float32, accumulate=turn == 1, what="unit")
        comm.progress()
        pending.wait()
        found.append(out)
    nbytes = packed_nbytes(numel) if comm.shared_memory is None else numel * dtype.itemsize
    assert sent["reduce"] - before == 2 * nbytes * (comm.num_ranks - 1)
    return found


def _averages(rank: int, num_ranks: int, dtype: torch.dtype, numel: int, packs: bool) -> list[torch.Tensor]:
    """What a rank gets, in other words; with `packs`, what others have for it is rounded."""
    found = []
    for turn in range(2):
        sums = [_values(other, numel * num_ranks, dtype, turn).chunk(num_ranks)[rank] for other in range(num_ranks)]
        if packs:
            sums = [each if other == rank else _rounded(each.float()) for other, each in enumerate(sums)]
        sums = [each.float() for each in sums]
        while len(sums) > 1:
            sums = [sum(sums[start : start + 2][1:], sums[start]) for start in range(0, len(sums), 2)]
        found.append(torch.full((numel,), float(turn)).add_(sums[0] / num_ranks))
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    "num_ranks, dtype, numel",
    [(2, torch.float32, 4000), *more((3, torch.bfloat16, 4000), (5, torch.float32, 16))],
)
def test_sums_of_rounded_values_are_the_same_whichever_way_they_go(num_ranks, dtype, numel):
    *ways, together = (
        play(_reductions, way, num_ranks, dtype, numel, bucket_nbytes=2**13)
        for way in ("messages", "native", "shared memory")
    )
    for rank in range(num_ranks):
        wanted = _averages(rank, num_ranks, dtype, numel, True)
        exact = _averages(rank, num_ranks, dtype, numel, False)
        for way in ways:
            assert all(map(torch.equal, way[rank], wanted))
        assert all(map(torch.equal, together[rank], exact)), "where memory is shared nothing is sent, nor rounded"
        # half a scale for each other rank, and what sums in fp32 round
        others = [each for each in range(num_ranks) if each != rank]
        ranges = [_values(other, numel * num_ranks, dtype, 0).chunk(num_ranks)[rank].float() for other in others]
        for index, off in enumerate((wanted[0] - exact[0]).abs().split(BLOCK_NUMEL)):
            largest = sum(each.split(BLOCK_NUMEL)[index].abs().max().item() for each in ranges)
            assert 0 < off.max() <= largest / HIGHEST / 2 / num_ranks + 1e-6
