"""Messages in pairs: how much travels ahead, and which message is whose."""

import pytest
import torch

from tests.comm.test_collectives import FP32, SMALL, average, connected, own_part, summand
from tests.distributed import ranks


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
