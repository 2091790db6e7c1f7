"""Which tests run when. This is the one place that says so; the Makefile only names the tiers.

| tier | `make` | which tests |
|---|---|---|
| quick | `test` | marked `quick`: what each room guarantees, in few cases. What a user runs after installing |
| core | `test-core` | the quick ones and those without a mark: what CI runs |
| full | `test-all` | marked `full`. `test-all` runs the other tiers too, and can be taken part by part (`PARTS`) |

A new test needs no mark: it is in the core, and so in CI. A mark is given for a reason that was measured:

    @pytest.mark.quick                         # guards what the room promises; takes little time
    @pytest.mark.quick(cases=2)                # so do its first two cases; the others are in the core
    @pytest.mark.full("more cases", after=2)   # its first two cases are in the core (or quick); the others are not
    pytest.param(3, marks=pytest.mark.full("slow"))

Where both marks apply to a test, `full` counts. The choice depends on nothing but the marks, so each commit runs the
same tests. Plain `pytest` runs quick and core; a test that is named on the command line (`file.py::test`, `-k`) always
runs.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import pytest


QUICK, CORE, FULL, ALL = "quick", "core", "full", "all"
# Why a test is outside of the core; the mark has to say which of these it is.
REASONS = {
    "more cases": "the cases in the core take the same way through the code",
    "slow": "it takes long beside what it adds to faster tests of the same",
}
# Each runs in less than an hour on two cores. A room that is named in none is in the last.
PARTS = {
    "engine": (
        *("comm", "hosts", "sharding", "storage", "engine", "optim", "activation"),
        *("planner", "simulated", "device", "gpu"),
    ),
    "checkpoint": ("checkpoint", "benchmarks"),
    "architectures": ("architectures",),
    "trainer": ("accelerator", "trainer"),
    "recipes": ("recipes", "trl"),
}
OTHERS = "recipes"

# Of all that was collected, the tests too that this run leaves out.
TIERS = pytest.StashKey[dict[pytest.Item, str]]()


def in_core(core: Collection, values: Iterable) -> list:
    """Parameters of a test, of which those in `core` bear no mark and the others are "more cases"."""
    return [param for value in values for param in ([value] if value in core else more(value))]


def more(*values) -> list:
    """Parameters of a test that are "more cases"."""
    mark = pytest.mark.full("more cases")
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=(QUICK, CORE, FULL, ALL), help="runs a tier; see tests/tiers.py")
    parser.addoption("--part", choices=tuple(PARTS), help="runs some rooms; see tests/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick(cases=all): `make test` runs its first cases; see tests/tiers.py")
    config.addinivalue_line("markers", "full(reason, after=0): only `make test-all` runs its later cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers, part = _wanted(config), config.getoption("part")
    tier_of = config.stash[TIERS] = tiers_of(items)
    kept = [item for item in items if tier_of[item] in tiers and part in (None, part_of(item))]
    if len(kept) < len(items):
        left_out = set(items) - set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


def pytest_report_header(config: pytest.Config) -> str:
    return f"tiers: {', '.join(_wanted(config))}; see tests/tiers.py"


def tiers_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, str]:
    """The tier of each collected test."""
    found: dict[pytest.Item, str] = {}
    num_cases: Counter[str] = Counter()
    num_in_core: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if any(num_cases[function] >= _after(item, mark) for mark in item.iter_markers(FULL)):
            found[item] = FULL
        else:
            limits = [mark.kwargs.get("cases", float("inf")) for mark in item.iter_markers(QUICK)][:1]
            found[item] = QUICK if limits and num_in_core[function] < limits[0] else CORE
            num_in_core[function] += 1
        num_cases[function] += 1
    return found


def part_of(item: pytest.Item) -> str:
    """The part of `make test-all` that runs this test."""
    room = item.nodeid.split("/")[1]
    return next((part for part, rooms in PARTS.items() if room in rooms), OTHERS)


def _after(item: pytest.Item, mark: pytest.Mark) -> int:
    if mark.args not in {(reason,) for reason in REASONS}:
        raise pytest.UsageError(f"{item.nodeid}: the mark `full` needs a reason, one of {', '.join(REASONS)}")
    return mark.kwargs.get("after", 0)


def _wanted(config: pytest.Config) -> tuple[str, ...]:
    """The tiers that this call of pytest runs."""
    tier = config.getoption("tier")
    if tier is None:
        is_named = any("::" in argument for argument in config.args) or config.getoption("keyword")
        tier = ALL if is_named else CORE
    return {CORE: (QUICK, CORE), ALL: (QUICK, CORE, FULL)}.get(tier, (tier,))
