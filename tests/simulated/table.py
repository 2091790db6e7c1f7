"""Which training notices which mutant. `places.json` keeps it, so that the fitting training is tried first.

A mutant counts as noticed by what `SAID` lists. What a busy machine could bring about too (an error, poison, a hang)
counts when the training fails twice, and passes as it is between the two. Else it is told as "unclear" and does not
count.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.distributed import RemoteError, run_ranks
from tests.simulated.clocks import Race
from tests.simulated.mutants import Mutant, applied, mutants, reached
from tests.simulated.training import ALONE, SCENARIOS, Facts, run


PLACES = Path(__file__).with_name("places.json")
PAGE = Path(__file__).parents[2] / "docs/reliability.md"
TIMEOUT_SECONDS = 60.0
UNCLEAR = "unclear"
SAID = {
    "race": "two accesses that nothing orders, or a message that changed before it had left",
    "values": "other losses, norms or weights",
    "order": "other collectives, or another order of them",
    "memory": "memory of the device that is in use for longer, or shorter",
    "poison": "values that are not finite, of memory that was not there yet or was given away",
    "error": "an error that the training raises",
    "hang": "ranks that wait for one another, at a place that is told",
}
HANGS = {"Timeout", "CommError"}


@dataclass(frozen=True)
class Way:
    """A training.

    Args:
        name (`str`): of the scenario.
        num_ranks (`int`): on so many ranks.
    """

    name: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} rank{'s' * (self.num_ranks > 1)}"


@dataclass(frozen=True)
class Finding:
    """What shows a mutant.

    Args:
        way (`Way`): the training.
        how (`str`): a key of `SAID`, or `UNCLEAR`.
        what (`str`): what it shows.
    """

    way: Way
    how: str
    what: str

    @property
    def counts(self) -> bool:
        return self.how != UNCLEAR


WAYS = [Way(name, scenario.num_ranks) for name, scenario in SCENARIOS.items()] + [Way(name, 1) for name in ALONE]


def known() -> dict[str, dict]:
    """What is kept of each place: how it was noticed, in which training, on how many ranks; or why nothing notices it
    ("equivalent": nothing could; "unnoticed": a training is missing)."""
    return json.loads(PLACES.read_text())


def keep(table: dict[str, dict]) -> None:
    """Writes the table, the places in the order of the package, those that are no more left out."""
    lines = [f"{json.dumps(str(each))}: {json.dumps(table[str(each)])}" for each in mutants() if str(each) in table]
    PLACES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def equivalents() -> dict[str, str]:
    """The places that nothing notices, each with the reason why the package does the same without that line."""
    return {name: entry["equivalent"] for name, entry in known().items() if "equivalent" in entry}


def first_notice(mutant: Mutant, ways: Iterable[Way] = ()) -> Finding | None:
    """What shows a mutant, in the training that is kept for it, else in the first of others.

    Args:
        mutant (`Mutant`): which.
        ways (`Iterable[Way]`): the others; those that do not come to its place are left out.
    """
    entry, unclear = known().get(str(mutant), {}), None
    own = [Way(entry["training"], entry["ranks"])] if entry.get("training") in SCENARIOS else []
    for way in [*own, *ways]:
        if way not in own and str(mutant) not in reaches(way):
            continue
        finding = _notice(mutant, way)
        if finding is not None and finding.counts:
            return finding
        unclear = unclear or finding
    return unclear


def summary(findings: dict[str, Finding | None]) -> str:
    """One line for what `first_notice` said of places that are not equivalent."""
    num_noticed = sum(finding is not None and finding.counts for finding in findings.values())
    return f"{num_noticed} of {len(findings)} noticed ({num_noticed / max(1, len(findings)):.1%})"


def page_part() -> str:
    """What docs/reliability.md says of the table."""
    hows = Counter(entry["how"] for entry in known().values() if "how" in entry)
    rows = [f"| {SAID[how]} | {count} |" for how, count in hows.most_common()]
    lines = [f"Of {len(mutants())} such places {hows.total()} are noticed:", "", "| by | places |", "|---|---|", *rows]
    for name, entry in known().items():
        if "equivalent" in entry:
            lines += ["", f"Without `{name}` the package does the same: {entry['equivalent']}."]
        if "unnoticed" in entry:
            lines += ["", f"`{name}` is not noticed: {entry['unnoticed']}."]
    return "\n".join(lines)


@cache
def reaches(way: Way) -> frozenset[str]:
    """The mutants whose places a training comes to."""
    return frozenset().union(*run_ranks(_reach, way.num_ranks, way.name, timeout=TIMEOUT_SECONDS))


@cache
def _facts(way: Way) -> list[Facts]:
    """What a training leaves, by rank, as the package is."""
    return run_ranks(_facts_of, way.num_ranks, way.name, timeout=TIMEOUT_SECONDS)


def _reach(name: str) -> set[str]:
    with reached(mutants()) as found:
        run(SCENARIOS[name])
    return found


def _facts_of(name: str) -> Facts:
    return run(SCENARIOS[name]).facts


def _without(mutant: Mutant, name: str) -> tuple[list[str], Facts]:
    with applied(mutant):
        result = run(SCENARIOS[name])
    return result.races, result.facts


def _notice(mutant: Mutant, way: Way) -> Finding | None:
    """What a training without a line shows."""
    first = _tried(mutant, way)
    if not isinstance(first, RemoteError):
        return _of_results(first, way)
    what = str(first).strip().splitlines()[-1]
    if first.kind == Race.__name__:
        return Finding(way, "race", what.partition(": ")[2])
    run_ranks(_facts_of, way.num_ranks, way.name, timeout=TIMEOUT_SECONDS)
    second = _tried(mutant, way)
    if not isinstance(second, RemoteError):
        return _of_results(second, way) or Finding(way, UNCLEAR, what)
    if "exit code -9" in str(first) + str(second):  # the system has no memory left
        return Finding(way, UNCLEAR, what)
    raised = next((each for each in (first, second) if each.kind not in HANGS), None)
    if raised is not None:
        return Finding(way, "poison" if raised.kind == "NonFiniteError" else "error", what)
    places = re.findall(r'File ".*/hf_zero/(\S+)", line (\d+) in (\w+)', str(first) + str(second))
    return Finding(way, "hang", ":".join(places[0])) if places else Finding(way, UNCLEAR, what)


def _tried(mutant: Mutant, way: Way) -> list[tuple[list[str], Facts]] | RemoteError:
    try:
        return run_ranks(_without, way.num_ranks, mutant, way.name, timeout=TIMEOUT_SECONDS)
    except RemoteError as error:
        return error


def _of_results(results: list[tuple[list[str], Facts]], way: Way) -> Finding | None:
    races = [race for races, _ in results for race in races]
    if races:
        return Finding(way, "race", races[0])
    differences = [own.difference_to(other) for (_, own), other in zip(results, _facts(way))]
    return next((Finding(way, *difference) for difference in differences if difference), None)
