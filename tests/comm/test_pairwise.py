"""Messages in pairs: how much travels ahead, and which message is whose."""

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.distributed import DistributedComm
from hf_zero.comm.pairwise import SUM_NBYTES
from tests.comm.test_collectives import CPU, FP32, SMALL, average, connected, own_part, summand
from tests.distributed import ranks
from tests.staged import StagedComm


@pytest.mark.parametrize("num_ranks", [2, 3])
@ranks("num_ranks")
def test_all_of_one_summand_travels_before_the_reduction_is_waited_for(num_ranks):
    comm, come, sent, post = connected("messages", SMALL), {}, [], DistributedComm._post

    def noted(comm, receives, sends, tag, what):
        sent.extend(tensor.nbytes for tensor, _ in sends)
        for tensor, rank in receives:
            come[rank] = come.get(rank, 0) + tensor.nbytes
        return post(comm, receives, sends, tag, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedComm, "_post", noted)
        for out_dtype in (torch.float32, torch.float64):
            full, out = summand(comm.rank, 5000 * num_ranks), torch.empty(5000, dtype=out_dtype)
            pending = comm.reduce_scatter(full, out, dtype=FP32, accumulate=False, what="apart")
            # all that one rank has for this one, and of the others' a piece that fits in the bucket with theirs
            assert max(come.values()) == 20_000 and sum(come.values()) <= 20_000 + SMALL, come
            pending.wait()
            assert sum(sent) == sum(come.values()) == 20_000 * (num_ranks - 1)
            come.clear(), sent.clear()
    assert len(comm.buckets) == (1 if num_ranks == 2 else 2), "two ranks stage nothing"


@pytest.mark.parametrize("num_ranks", [2, 3])
@ranks("num_ranks")
def test_ranks_need_not_have_their_averages_in_like_places(num_ranks):
    """Each rank has its averages in another place: added to what is there, apart, and in its own summand."""
    comm, numel = connected("messages", SMALL), 5000
    wanted = own_part(comm, average(num_ranks, numel * num_ranks))
    for turn in range(3):
        kind = (comm.rank + turn) % 3
        full = summand(comm.rank, numel * num_ranks)
        out = own_part(comm, full) if kind == 2 else torch.full((numel,), 7.0)
        comm.reduce_scatter(full, out, dtype=FP32, accumulate=kind == 0, what="unlike").wait()
        assert torch.equal(out, wanted + 7 if kind == 0 else wanted), turn


@pytest.mark.quick
@ranks(2)
def test_units_of_two_models_that_have_one_name_are_not_mixed_up():
    comms = [connected("messages"), connected("messages")]
    numel, found = 30, {}
    for seed in (0, 1) if comms[0].rank == 0 else (1, 0):
        out, full = torch.empty(numel // 2), summand(comms[0].rank, numel, seed=seed)
        found[seed] = out, comms[seed].reduce_scatter(full, out, dtype=FP32, accumulate=False, what="layers.0")
    for seed, (out, pending) in found.items():
        pending.wait()
        assert torch.equal(out, own_part(comms[0], average(2, numel, seed=seed))), seed


@ranks(3)
def test_tensors_of_a_device_are_staged_in_two_more_buckets():
    comm = StagedComm(dist.group.WORLD, CPU, 60.0, SMALL)
    comm.reduce_scatter(torch.ones(9000), torch.empty(3000), dtype=FP32, accumulate=False, what="sum").wait()
    assert [bucket.memory.numel() for bucket in comm.buckets] == [SMALL, SUM_NBYTES, SMALL, SMALL]
    assert comm.buffer_nbytes == 3 * SMALL + SUM_NBYTES
