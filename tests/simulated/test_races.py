"""Every way of the engine on a simulated accelerator: nothing is used before it is there, and no bit changes.

`tests/simulated/accelerator.py` says what is simulated.
"""

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import native
from hf_zero.engine import build
from tests.distributed import run_ranks
from tests.simulated import accelerator
from tests.simulated.training import ALONE, SCENARIOS, Result, run, train
from tests.tiers import in_core
from tests.training import Record, assert_equal


def _plain(name: str) -> Record:
    """The same training on the CPU, through the same collectives."""

    def connect(*_, **__):
        return native.NativeComm(dist.group.WORLD, torch.device("cpu"), 60.0, accelerator.BUCKET_NBYTES)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_world_size() > 1:
            patch.setattr(build, "connect", connect)
        return train(SCENARIOS[name], torch.device("cpu"))


def _trains(name: str) -> tuple[list[str], list, dict[str, int]]:
    result: Result = run(SCENARIOS[name])
    assert_equal(result.record, _plain(name), name)
    return result.races, result.collectives, result.host_waits


CORE = [*((name, 2) for name in SCENARIOS), *((name, 1) for name in ALONE)]
CASES = [(name, num_ranks) for num_ranks in (2, 1) for name in SCENARIOS]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name, num_ranks", in_core(CORE, CASES))
def test_nothing_is_used_before_it_is_there(name, num_ranks):
    reports = run_ranks(_trains, num_ranks, name)
    for races, collectives, _ in reports:
        assert not races, "\n".join(races)
        assert collectives == reports[0][1], "the ranks launch their collectives in different orders"
    assert bool(reports[0][1]) is (num_ranks > 1)
