"""Each test has one tier, whatever the commit, and each room has tests in the quick one."""

from pathlib import Path

import pytest

from hf_zero.engine import direct
from tests.distributed import ranks
from tests.tiers import CORE, FULL, QUICK, TIERS, tiers_of


pytestmark = pytest.mark.quick

TESTS = Path(__file__).parent


class Item:
    """As much of a collected test as its tier depends on."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator):
        self.nodeid = nodeid
        self._marks = [decorator.mark for decorator in marks]

    def iter_markers(self, name: str):
        return (mark for mark in self._marks if mark.name == name)


def tiers(num_cases: int, *marks: pytest.MarkDecorator) -> list[str]:
    """Of a function with so many cases."""
    return list(tiers_of([Item(f"tests/room/test_a.py::test_b[{i}]", *marks) for i in range(num_cases)]).values())


def test_first_cases_may_be_in_a_faster_tier_and_others_are_in_the_core():
    assert tiers(2) == [CORE, CORE]
    assert tiers(3, pytest.mark.quick(cases=1)) == [QUICK, CORE, CORE]
    assert tiers(4, pytest.mark.quick(cases=1), pytest.mark.full("slow", after=3)) == [QUICK, CORE, CORE, FULL]
    assert tiers(2, pytest.mark.full("more cases")) == [FULL, FULL]
    items = [Item("tests/room/test_a.py::test_b[0]", pytest.mark.quick(cases=1), pytest.mark.full("slow"))]
    items += [Item(f"tests/room/test_a.py::test_b[{i}]", pytest.mark.quick(cases=1)) for i in (1, 2)]
    assert list(tiers_of(items).values()) == [FULL, QUICK, CORE], "those outside of the core are not counted"


@pytest.mark.parametrize("marks", [pytest.mark.full, pytest.mark.full("I had no time")], ids=["none", "another"])
def test_what_is_outside_of_the_core_says_why(marks):
    with pytest.raises(pytest.UsageError, match="needs a reason, one of more cases, slow"):
        tiers(1, marks)


def test_each_room_has_quick_tests(request):
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("tells only when all tests are collected: `make test`")
    rooms = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    quick = {item.nodeid.split("/")[1] for item, tier in request.config.stash[TIERS].items() if tier == QUICK}
    rooms.remove("device")  # which has to be compiled
    assert rooms <= quick, f"rooms without: {sorted(rooms - quick)}"


@pytest.mark.parametrize("least", [pytest.param(0, marks=pytest.mark.direct), direct.MIN_NUMEL])
@ranks(1)
def test_ranks_write_gradients_of_small_weights_directly_where_the_test_says_so(least):
    assert direct.MIN_NUMEL == least
