"""Which training notices which mutant. Each is tried with the trainings that reach its line, the shortest first."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tests.distributed import RemoteError, run_ranks
from tests.simulated.mutants import Mutant, applied, mutants, reached
from tests.simulated.training import ALONE, SCENARIOS, Facts, run


TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Way:
    """A training, and what is known of it when nothing is left out.

    Args:
        name (`str`): of the scenario.
        num_ranks (`int`): on so many ranks.
        seconds (`float`): that it takes.
        reaches (`frozenset[str]`): the mutants that it comes to.
        facts (`tuple[Facts, ...]`): what it leaves, by rank; empty where that is not compared.
    """

    name: str
    num_ranks: int
    seconds: float = 0.0
    reaches: frozenset[str] = frozenset()
    facts: tuple[Facts, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} rank{'s' * (self.num_ranks > 1)}"


WAYS = [(name, 2) for name in SCENARIOS] + [(name, 1) for name in ALONE]


def _reach(name: str) -> tuple[set[str], float, Facts]:
    start = time.perf_counter()
    with reached(mutants()) as found:
        result = run(SCENARIOS[name])
    return found, time.perf_counter() - start, result.facts


@cache
def survey() -> tuple[Way, ...]:
    """All trainings, the shortest first."""
    ways = []
    for name, num_ranks in WAYS:
        found, seconds, facts = zip(*run_ranks(_reach, num_ranks, name, timeout=TIMEOUT_SECONDS))
        ways.append(Way(name, num_ranks, max(seconds), frozenset().union(*found), facts))
    return tuple(sorted(ways, key=lambda way: way.seconds))


def _notice(mutant: Mutant, way: Way) -> str:
    """What a training without that line shows; nothing where it is as before."""
    import torch.distributed as dist

    with applied(mutant):
        result = run(SCENARIOS[way.name])
    if result.races:
        return result.races[0]
    return result.facts.differ_from(way.facts[dist.get_rank()]) if way.facts else ""


def first_notice(mutant: Mutant, ways: Iterable[Way]) -> tuple[str, str]:
    """The first training that shows a mutant, and what it shows."""
    for way in ways:
        if way.facts and str(mutant) not in way.reaches:
            continue
        try:
            told = next(filter(None, run_ranks(_notice, way.num_ranks, mutant, way, timeout=TIMEOUT_SECONDS)), "")
        except RemoteError as error:
            told = str(error).strip().splitlines()[-1]
        if told:
            return str(way), told
    return "", ""


def summary(told: dict[str, tuple[str, str]]) -> str:
    """One line for what `first_notice` said of mutants."""
    num_caught = sum(bool(what) for _, what in told.values())
    return f"{num_caught} of {len(told)} caught ({num_caught / max(1, len(told)):.1%})"
