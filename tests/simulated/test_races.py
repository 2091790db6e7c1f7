"""Every way of the engine on a simulated accelerator: nothing is used before it is there, and no bit changes.

`tests/simulated/accelerator.py` says what is simulated.
"""

import pytest

from tests.distributed import run_ranks
from tests.simulated.training import SCENARIOS, trains
from tests.tiers import in_core


ON_DEVICES = [name for name, scenario in SCENARIOS.items() if scenario.world == "accelerator"]
# One way through each kind of wait.
CORE = [
    *(
        ("stage 3", 2),
        ("stage 1, dropped", 2),
        ("stage 1, bf16", 2),
        ("stage 1, bf16, gradients held", 2),
        ("stage 2", 2),
        ("stage 3, three ahead, bf16", 2),
    ),
    *(("stage 2, optimizer on the host", 2), ("parameters on the host", 2), ("activations on the host", 2)),
    ("shared memory, stage 3", 2),
]
CASES = [
    *((name, 2) for name in SCENARIOS),
    *((name, 1) for name in ON_DEVICES if not SCENARIOS[name].divides),
    *((name, 3) for name in ON_DEVICES),
]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name, num_ranks", in_core(CORE, CASES))
def test_nothing_is_used_before_it_is_there(name, num_ranks):
    found = run_ranks(trains, num_ranks, name)
    for races, collectives in found:
        assert not races, "\n".join(races)
        assert collectives == found[0][1], "the ranks launch their collectives in different orders"
    kinds = {what for _, what, _ in found[0][1]} - {"broadcast"}  # of buffers, by whichever ranks
    assert bool(kinds) is (num_ranks > 1 and name in ON_DEVICES)


@pytest.mark.full("more cases")
@pytest.mark.parametrize("name", ON_DEVICES)
def test_what_an_accelerator_may_choose_changes_nothing(name):
    for seed in (1, 2):
        assert not any(races for races, _ in run_ranks(trains, 2, name, seed))
