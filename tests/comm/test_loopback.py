"""Ranks that are threads of one process: what they exchange, and that none waits for one that has failed."""

import time

import pytest
import torch

from hf_zero.errors import CommError
from tests.loopback import LoopbackComm, run_loopback


CPU = torch.device("cpu")
SMALL = 4096


def test_values_go_between_all_ranks():
    def play(comm: LoopbackComm) -> list:
        shard = torch.arange(3.0) + 10 * comm.rank
        full = torch.zeros(9)
        comm.all_gather(full, shard, what="unit").wait()
        following, last = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        received, first = torch.zeros(3), shard.clone()
        comm.exchange([(shard, following)], [(received, last)], what="unit").wait()
        comm.broadcast_(first)
        numbers = comm.all_gather_vector(torch.tensor([comm.rank, 7]))
        side = comm.side_group("files")
        objects = [side.all_gather_object({"rank": comm.rank}), comm.broadcast_object(comm.rank + 5)]
        if comm.rank == 0:
            comm.send(shard, 2)
        if comm.rank == 2:
            comm.receive(shard, 0)
        comm.barrier()
        return [full.tolist(), received.tolist(), first.tolist(), numbers.tolist(), objects, shard.tolist()]

    found = run_loopback(3, play, CPU)
    for rank, (full, received, first, numbers, objects, shard) in enumerate(found):
        assert full == [0, 1, 2, 10, 11, 12, 20, 21, 22]
        assert received == [10.0 * ((rank - 1) % 3) + each for each in range(3)]
        assert first == [0, 1, 2] and numbers == [[0, 7], [1, 7], [2, 7]]
        assert objects == [[{"rank": each} for each in range(3)], 5]
        assert shard == [10.0 * (0 if rank == 2 else rank) + each for each in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_a_reduction_are_its_average(dtype):
    def play(comm: LoopbackComm) -> bool:
        summands = [torch.randn(2 * 3001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in (0, 1)]
        wanted = ((summands[0].float() + summands[1].float()) / 2).chunk(2)[comm.rank]
        out = torch.ones(3001)
        for accumulate in (False, True):
            full = summands[comm.rank].clone()
            comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=accumulate, what="unit").wait()
        return torch.equal(out, wanted + wanted)

    assert run_loopback(2, play, CPU, bucket_nbytes=SMALL) == [True, True]


@pytest.mark.quick
def test_parts_of_the_ranks_exchange_among_themselves():
    def play(comm: LoopbackComm) -> list:
        comm.connect_parts(shard_size=2)
        gathered, own = torch.zeros(2), torch.empty(2)
        comm.shard_group.all_gather(gathered, torch.tensor([float(comm.rank)]), what="unit").wait()
        summand = comm.rank * torch.arange(4.0)
        comm.average(summand, own, dtype=torch.float32, accumulate=False, what="unit").wait()
        beside = [comm.neighbours(size).all_gather_object(comm.rank) for size in (1, 2, 4)]
        return [gathered.tolist(), own.tolist(), beside]

    for rank, (gathered, own, beside) in enumerate(run_loopback(4, play, CPU)):
        first = rank // 2 * 2
        assert gathered == [first, first + 1] and own == ([0.0, 1.5], [3.0, 4.5])[rank % 2]
        assert beside == [[rank], [first, first + 1], [0, 1, 2, 3]]


@pytest.mark.quick
def test_nobody_waits_for_a_rank_that_has_failed():
    def play(comm: LoopbackComm) -> None:
        if comm.rank == 1:
            raise ValueError("the reason")
        comm.neighbours(2).barrier()

    begin = time.monotonic()
    for num_ranks in (2, 4):  # of four ranks, the neighbours are a part
        with pytest.raises(ValueError, match="the reason"):
            run_loopback(num_ranks, play, CPU)
    assert time.monotonic() - begin < 20
    with pytest.raises(CommError, match="rank 0 waited for a rank that has failed, or that did not come"):
        run_loopback(2, lambda comm: comm.rank or comm.barrier(), CPU, timeout_seconds=0.5)
