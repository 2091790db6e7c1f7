"""Test tiers. The marks of a test decide its tier; the Makefile only names the tiers.

| tier | `make` | tests |
|---|---|---|
| quick | `test` | marked `quick`: the main promises of each folder, in few cases; for users after installation |
| core | `test-core` | the quick tests and those without a mark; runs in CI |
| full | `test-all` | marked `full`; `test-all` also runs the other tiers, optionally in parts (`PARTS`) |

A new test needs no mark: it is in the core, and so in CI. Measure before you add a mark:

    @pytest.mark.quick                         # tests a main promise and takes little time
    @pytest.mark.quick(cases=2)                # the first two cases are quick, the others core
    @pytest.mark.full("more cases", after=2)   # the first two cases are core (or quick), the others full
    pytest.param(3, marks=pytest.mark.full("slow"))

If both marks apply, `full` wins. Plain `pytest` runs the core. Tests named on the command line (`file.py::test`
or `-k`) always run.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import pytest


QUICK, CORE, FULL, ALL = "quick", "core", "full", "all"
# Reasons for the mark `full`, which must give one of them.
REASONS = {
    "more cases": "the cases in the core take the same path through the code",
    "slow": "it takes long compared with what it adds to faster tests",
}
# Each part runs in less than an hour on two cores. Folders that are not listed belong to the last one.
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

# The tier of every collected test, including deselected ones.
TIERS = pytest.StashKey[dict[pytest.Item, str]]()


def in_core(core: Collection, values: Iterable) -> list:
    """Returns parameters of a test; those that are not in `core` get the mark "more cases"."""
    return [param for value in values for param in ([value] if value in core else more(value))]


def more(*values) -> list:
    """Returns parameters of a test with the mark "more cases"."""
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
    """Returns the tier of each collected test."""
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
    """Returns the part of `make test-all` that runs this test."""
    room = item.nodeid.split("/")[1]
    return next((part for part, rooms in PARTS.items() if room in rooms), OTHERS)


def _after(item: pytest.Item, mark: pytest.Mark) -> int:
    if mark.args not in {(reason,) for reason in REASONS}:
        raise pytest.UsageError(f"{item.nodeid}: the mark `full` needs a reason, one of {', '.join(REASONS)}")
    return mark.kwargs.get("after", 0)


def _wanted(config: pytest.Config) -> tuple[str, ...]:
    """Returns the tiers that this call of pytest runs."""
    tier = config.getoption("tier")
    if tier is None:
        is_named = any("::" in argument for argument in config.args) or config.getoption("keyword")
        tier = ALL if is_named else CORE
    return {CORE: (QUICK, CORE), ALL: (QUICK, CORE, FULL)}.get(tier, (tier,))
