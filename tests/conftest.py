from functools import partial

import pytest

from hf_zero.engine import direct
from tests import docs
from tests.distributed import start_fork_server
from tests.support import Recorder


pytest_plugins = ["tests.tiers"]


def pytest_addoption(parser):
    parser.addoption("--write-docs", action="store_true", help="writes the pages of docs/ that are made by tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "support(feature, area, stages, refused): a cell of docs/support.md")
    config.addinivalue_line("markers", "direct: gradients of weights of any size are written directly")
    config.addinivalue_line("markers", "gpu: needs an accelerator; `make test-gpu` runs these tests")
    recorder = Recorder(writes=config.getoption("--write-docs"))
    config.stash[RECORDER] = recorder
    config.pluginmanager.register(recorder)


RECORDER = pytest.StashKey[Recorder]()


def pytest_sessionstart(session):
    """Starts the fork server, which does its imports while tests are collected, if the run is likely to need ranks."""
    config = session.config
    is_worker = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if is_worker and config.getoption("tier") and not config.getoption("collectonly"):
        start_fork_server()


@pytest.fixture(autouse=True, scope="module")
def _direct_in_module(request):
    """Runs before other fixtures of the module, which may train."""
    yield from _any_size_goes_directly(request.node)


@pytest.fixture(autouse=True)
def _direct_in_test(request):
    yield from _any_size_goes_directly(request.node)


def _any_size_goes_directly(node):
    """Sets the limit to zero for tests marked `direct`, in this process and in ranks. Other tests keep the engine's
    limit, which their small models do not reach."""
    with pytest.MonkeyPatch.context() as patch:
        if node.get_closest_marker("direct") is not None:
            patch.setattr(direct, "MIN_NUMEL", 0)
        yield


@pytest.fixture
def writes_docs(request) -> bool:
    return request.config.getoption("--write-docs")


@pytest.fixture
def check_part(writes_docs):
    """Compares a generated part of a page; see `tests/docs.py`."""
    return partial(docs.check_part, writes=writes_docs)
