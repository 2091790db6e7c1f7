"""Every way of the engine on a simulated accelerator: nothing is used before it is there, and no bit changes.

`tests/simulated/accelerator.py` says what is simulated.
"""

import re
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.simulated.training import SCENARIOS, trains
from tests.tiers import in_core


ON_DEVICES = [name for name, scenario in SCENARIOS.items() if scenario.world == "accelerator"]
OF_ANY = [name for name in ON_DEVICES if SCENARIOS[name].num_ranks == 2]
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
    *((name, scenario.num_ranks) for name, scenario in SCENARIOS.items()),
    *((name, 1) for name in OF_ANY if not SCENARIOS[name].shares_batches),
    *((name, 3) for name in OF_ANY if "sequence_parallel" not in SCENARIOS[name].settings),
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
        assert not any(races for races, _ in run_ranks(trains, SCENARIOS[name].num_ranks, name, seed))


# What is not there for other devices, and what only a report on a machine reads.
DIRECT = {
    "comm/world.py": {"torch.cuda.nccl.version"},
    "recipes/env.py": {"torch.cuda.nccl.version"},
    "recipes/plan_input.py": {"torch.cuda.get_device_properties", "torch.cuda.is_available"},
    "recipes/report.py": {"torch.cuda.get_device_name", "torch.cuda.max_memory_allocated"},
}


def test_devices_are_reached_by_one_door():
    package = Path(__file__).parents[2] / "hf_zero"
    found = {
        str(file.relative_to(package)): set(re.findall(r"torch\.cuda[.\w]*", file.read_text()))
        for file in package.rglob("*.py")
    }
    assert {name: uses for name, uses in found.items() if uses} == DIRECT
