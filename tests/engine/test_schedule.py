"""The order in which units are taken, alone: it depends on the model and on what all ranks know, not on the calls."""

import itertools
from collections.abc import Iterator

import pytest

from hf_zero.engine.schedule import Schedule, Stack, Visit


pytestmark = pytest.mark.quick


def stack_of(count: int, prefix: str = "u") -> Stack:
    """A stack of units, of which the schedule needs no more than that they differ."""
    return Stack([f"{prefix}{index}" for index in range(count)])


def taken_by(visits: Iterator[Visit]) -> list[str]:
    """The units that a backward comes to."""
    return [visit.unit for visit in visits]


def forward(stack: Stack, called: list[str]) -> list[str]:
    """One pass of the owner's forward: what is gathered."""
    taken = []
    for unit in called:
        taken += stack.advance(unit)
    return taken + stack.finish()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_subset_of_the_blocks_takes_the_same_units(count):
    units = [f"u{index}" for index in range(count)]
    for size in range(count + 1):
        for called in itertools.combinations(units, size):
            stack = stack_of(count)
            assert forward(stack, list(called)) == units
            assert forward(stack, units) == units, "a pass depends on the one before"


UNITS = ["u0", "u1", "u2", "u3"]


def taped(*passes: list[str]) -> tuple[Schedule, list[list[str]]]:
    """A schedule after these forwards, and its tapes of them."""
    schedule, tapes = Schedule([stack_of(len(UNITS))]), []
    for units in passes:
        schedule.begin_pass()
        tapes.append(schedule.current_pass)
        for unit in units:
            schedule.record(unit)
    return schedule, tapes


@pytest.mark.parametrize("size", range(5))
def test_backward_takes_the_same_units_whatever_it_visits(size):
    for visited in itertools.combinations(reversed(UNITS), size):
        schedule, (tape,) = taped(UNITS)
        taken = taken_by(schedule.open_pass(tape))  # the gradient of the output comes first, on every rank
        for unit in visited:
            taken += taken_by(schedule.rewind_to(unit))
            assert taken[-1] == unit
        assert taken + taken_by(schedule.finish_passes()) == UNITS[::-1]


def test_a_unit_is_complete_when_every_noted_use_of_it_was_visited():
    schedule, (tape,) = taped(["u0", "u1", "u0", "u1"])
    taken_by(schedule.open_pass(tape))
    wanted = [("u1", set()), ("u0", set()), ("u1", {"u1"}), ("u0", {"u0", "u1"})]
    for unit, complete in wanted:
        assert taken_by(schedule.rewind_to(unit)) == [unit]
        assert {u for u in UNITS if schedule.is_complete(u)} == complete


@pytest.mark.parametrize("visited_first", [[], ["u3"], ["u2", "u0"], ["u3", "u2", "u1", "u0"]])
def test_opening_another_pass_takes_what_is_left_of_the_one_before(visited_first):
    schedule, tapes = taped(UNITS, UNITS)
    taken = taken_by(schedule.open_pass(tapes[1]))
    for unit in visited_first:
        taken += taken_by(schedule.rewind_to(unit))
    taken += taken_by(schedule.open_pass(tapes[0]))
    assert taken == UNITS[::-1]
    assert taken + taken_by(schedule.finish_passes()) == UNITS[::-1] * 2


def test_what_comes_next_is_foreseen():
    schedule, (tape,) = taped(["u0", "u1", "u2"])
    (stack,) = schedule.stacks
    stack.advance("u1")
    assert schedule.after("u1", 1) == ["u2"]
    assert schedule.after("u1", 5) == ["u2", "u3"]
    assert schedule.after("u1", 0) == []
    assert schedule.before(2) == []
    taken_by(schedule.open_pass(tape))
    assert schedule.before(1) == ["u2"]
    assert schedule.before(2) == ["u2", "u1"]
    assert schedule.before(0) == []


def test_reset_forgets_tape_and_places():
    schedule, _ = taped(UNITS)
    schedule.stacks[0].advance("u2")
    schedule.reset()
    assert schedule.current_pass == []
    assert taken_by(schedule.rewind_to("u3")) == ["u3"]
    assert schedule.stacks[0].advance("u0") == ["u0"]
