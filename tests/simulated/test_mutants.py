"""A package with one wait less is noticed: the simulated accelerator can tell, and every wait is needed.

Here are some of `comm/`. `python -m tests.simulated --all` tries those of the whole package, and prints the table.
"""

import pytest

from tests.simulated.mutants import mutants
from tests.simulated.table import Way, first_notice


# Trainings that take the most ways at once.
FIRST = (
    "parameters on the host, bf16, saving",
    "stage 3, three ahead, bf16",
    "optimizer on the host, bf16",
    "parameters on disk",
    "activations on the host",
    "optimizer on the host, delayed, loading",
)
COMM = [each for each in mutants() if each.file in ("comm/bus.py", "comm/native.py")]
COMM.sort(key=lambda each: each.function in ("Bus.synchronize", "Bus._copy"))  # these take longest to notice


@pytest.mark.quick(cases=1)
@pytest.mark.full("more cases", after=8)
@pytest.mark.parametrize("mutant", COMM, ids=str)
def test_a_wait_less_is_noticed(mutant):
    assert first_notice(mutant, [Way(name, 2) for name in FIRST])[1]


def test_each_place_is_told_from_the_others():
    assert len(set(map(str, mutants()))) == len(mutants())
