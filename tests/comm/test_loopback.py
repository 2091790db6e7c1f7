"""Ranks that are threads of one process: their parts and messages, and that none waits for one that has failed.
`test_collectives.py` tests their collectives."""

import time

import pytest
import torch

from hf_zero.errors import CommError
from tests.comm.test_collectives import CPU
from tests.loopback import LoopbackComm, run_loopback


def test_messages_go_from_rank_to_rank():
    def play(comm: LoopbackComm) -> list:
        values = torch.arange(3.0) + 10 * comm.rank
        if comm.rank == 0:
            comm.send(values, 2)
        if comm.rank == 2:
            comm.receive(values, 0)
        return values.tolist()

    assert run_loopback(3, play, CPU) == [[0, 1, 2], [10, 11, 12], [0, 1, 2]]


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
