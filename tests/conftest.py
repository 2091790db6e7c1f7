import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from hf_zero.engine import direct
from tests.support import Recorder


direct.MIN_NUMEL = 0  # the models of the tests are small; see also `tests.distributed`

# Of the tests marked `rotating`, one in so many runs without --all: another part for every commit.
NUM_SLICES = 12


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="runs all tests that are marked rotating, not one slice")
    parser.addoption("--write-docs", action="store_true", help="writes the pages of docs/ that are made by tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "rotating(always=0): one of many like it; each commit runs a slice, --all all")
    config.addinivalue_line("markers", "support(feature, area, stages, refused): a cell of docs/support.md")
    recorder = Recorder(writes=config.getoption("--write-docs"))
    config.stash[RECORDER] = recorder
    config.pluginmanager.register(recorder)


RECORDER = pytest.StashKey[Recorder]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    turn = _turn()
    waits = [item for item in _rotating(items) if not _is_named(config, item)]
    waits = [item for item in waits if crc32(item.nodeid.encode()) % NUM_SLICES != turn]
    config.hook.pytest_deselected(items=waits)
    kept = set(items) - set(waits)
    items[:] = [item for item in items if item in kept]


def _rotating(items) -> Iterator[pytest.Item]:
    """The tests that take turns: of a function that is marked `rotating(always=N)`, all but its first N cases."""
    num_cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("rotating")
        if mark is not None:
            function = item.nodeid.partition("[")[0]
            num_cases[function] += 1
            if num_cases[function] > mark.kwargs.get("always", 0):
                yield item


def pytest_report_header(config):
    return "" if config.getoption("--all") else f"rotating tests: slice {_turn()} of {NUM_SLICES}; --all runs them all"


def _is_named(config, item) -> bool:
    """Whether the user asked for this very test, or has chosen by name."""
    return any("::" in argument for argument in config.args) or bool(config.getoption("keyword"))


def _turn() -> int:
    """Which slice this commit runs."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(found.stdout, 16) % NUM_SLICES if found.returncode == 0 else 0
