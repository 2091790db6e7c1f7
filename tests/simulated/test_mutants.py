"""A package with one wait less is noticed: the simulated accelerator can tell, and every wait is needed.

Here are those of `comm/`. `python -m tests.simulated` prints the table of all, which takes most of an hour.
"""

from collections.abc import Iterable

import pytest

from tests.distributed import RemoteError, run_ranks
from tests.simulated.mutants import Mutant, applied, mutants
from tests.simulated.training import ALONE, SCENARIOS, run


def _noticed(mutant: Mutant, name: str) -> str:
    """What a training without that line shows; nothing where it is as before."""
    with applied(mutant):
        result = run(SCENARIOS[name])
    return result.races[0] if result.races else ""


# Mutants of `comm` that are not noticed. A checkpoint that is loaded is written to masters by way of numpy, which the
# simulation takes for a read; what else waits here comes after another wait.
UNNOTICED = {
    "comm/bus.py Bus.synchronize: event.record(stream)",
    "comm/bus.py Bus.synchronize: event.synchronize()",
}
# Those that take the most ways at once.
FIRST = (
    "parameters on the host, bf16, saving",
    "stage 3, three ahead, bf16",
    "optimizer on the host, bf16",
    "parameters on disk",
    "activations on the host",
)


def first_notice(mutant: Mutant, names: Iterable[str] = tuple(SCENARIOS)) -> tuple[str, str]:
    """The first scenario that shows a mutant, and what it shows."""
    for name in sorted(names, key=lambda name: name not in FIRST):
        for num_ranks in (2, 1) if name in ALONE else (2,):
            try:
                told = next(filter(None, run_ranks(_noticed, num_ranks, mutant, name, timeout=60.0)), "")
            except RemoteError as error:
                told = str(error).strip().splitlines()[-1]
            if told:
                return f"{name}, {num_ranks} rank{'s' * (num_ranks > 1)}", told
    return "", ""


COMM = [mutant for mutant in mutants() if mutant.file.startswith("comm/") and str(mutant) not in UNNOTICED]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("mutant", COMM, ids=str)
def test_a_wait_less_is_noticed(mutant):
    assert first_notice(mutant)[1]


def test_what_is_told_of_is_there():
    assert UNNOTICED <= {str(mutant) for mutant in mutants()}
