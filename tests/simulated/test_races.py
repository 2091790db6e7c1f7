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
# What these come to besides is of the host, or of CPUs, which the ordinary tests try too.
LATER = {
    "stage 2, a vocabulary apart, bf16",
    "parameters on the host, a vocabulary apart, a backward that breaks off",
    "stage 3, shared sequences",
    "stage 3, loading",
    "parameters on the host, loading",
    "optimizer on disk, loading",
    "optimizer on the host, in backward, which breaks off",
    "optimizer on the host, loading",
    "parameters on the host, a backward that breaks off",
    "activations on the host, a backward that breaks off",
}
OF_ANY = [name for name in ON_DEVICES if SCENARIOS[name].num_ranks == 2]
CORE = [(name, SCENARIOS[name].num_ranks) for name in ON_DEVICES if name not in LATER]
CORE += [("shared memory, stage 3", 2), ("messages, stage 3", 2), ("staged messages, stage 3, whole matrices", 2)]
CORE += [("parameters on disk", 1), ("stage 3, blocks skipped", 3)]
CASES = [
    *((name, scenario.num_ranks) for name, scenario in SCENARIOS.items()),
    *((name, 1) for name in OF_ANY if not SCENARIOS[name].shares_batches),
    *((name, 3) for name in OF_ANY if "sequence_parallel" not in SCENARIOS[name].settings),
]


@pytest.mark.full("more cases", after=9)
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
    "recipes/telemetry.py": {"torch.cuda.get_device_name", "torch.cuda.max_memory_allocated"},
}


def test_devices_are_reached_by_one_door():
    package = Path(__file__).parents[2] / "hf_zero"
    found = {
        str(file.relative_to(package)): set(re.findall(r"torch\.cuda[.\w]*", file.read_text()))
        for file in package.rglob("*.py")
    }
    assert {name: uses for name, uses in found.items() if uses} == DIRECT
