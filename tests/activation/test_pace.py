"""How many copies a forward hides is learned from the device's own clock."""

import pytest

from hf_zero.activation.store import Pace


pytestmark = pytest.mark.quick


class Clock:
    """A device whose events take the time that the test says."""

    def __init__(self):
        self.now = 0.0
        self.is_late = False  # the events have not passed yet

    def record(self):
        return Event(self)


class Event:
    def __init__(self, clock: Clock):
        self._clock, self.at = clock, clock.now

    def query(self) -> bool:
        return not self._clock.is_late

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def forward(pace: Pace, clock: Clock, num_blocks: int, block: float, copy: float) -> int:
    """A forward of blocks that take so long each, with copies that do; how many were sent."""
    sent = 0
    for height in range(num_blocks):
        start = clock.now
        pace.mark()
        if pace.allows(height):
            pace.begin()
            clock.now += copy
            pace.end()
            sent += 1
        clock.now = start + block
    pace.turn()
    return sent


def test_as_many_copies_go_as_blocks_hide():
    clock = Clock()
    pace = Pace(clock.record)
    assert forward(pace, clock, 11, block=1.0, copy=2.5) == 11, "nothing is known before the first forward"
    forward(pace, clock, 11, block=1.0, copy=2.5)
    # ten blocks lie between the first and the last checkpoint, and a copy takes as long as 2.5 of them
    assert forward(pace, clock, 11, block=1.0, copy=2.5) == 4
    for _ in range(2):
        forward(pace, clock, 11, block=1.0, copy=0.5)
    assert forward(pace, clock, 11, block=1.0, copy=0.5) == 11, "a bus that is fast again is used again"


def test_it_does_not_wait_for_events_that_have_not_passed():
    clock = Clock()
    pace = Pace(clock.record)
    clock.is_late = True
    for _ in range(3):
        assert forward(pace, clock, 5, block=1.0, copy=9.0) == 5


def test_a_device_without_a_clock_sends_all():
    pace = Pace(None)
    assert [forward(pace, Clock(), 7, block=1.0, copy=9.0) for _ in range(3)] == [7, 7, 7]
