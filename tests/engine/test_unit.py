"""The moves that a unit may make, and no others."""

import itertools

import pytest

from hf_zero.engine.unit import ALLOWED, Phase, moved
from hf_zero.errors import LifecycleError


pytestmark = pytest.mark.quick


@pytest.mark.parametrize("start, end", list(itertools.product(Phase, Phase)))
def test_only_the_listed_moves_are_allowed(start, end):
    if (start, end) in ALLOWED:
        assert moved("layers.3", start, end) is end
    else:
        with pytest.raises(LifecycleError, match=rf"layers\.3.*{start.name} -> {end.name}"):
            moved("layers.3", start, end)


def test_every_phase_can_be_reached_from_every_other():
    reached = {phase: {end for start, end in ALLOWED if start is phase} for phase in Phase}
    for phase in Phase:
        known = {phase}
        while True:
            more = set().union(*(reached[p] for p in known)) - known
            if not more:
                break
            known |= more
        assert known == set(Phase), f"{phase} is a dead end"


def test_parameters_become_whole_only_through_a_gather():
    assert [start for start, end in ALLOWED if end is Phase.UNSHARDED] == [Phase.GATHERED]
    assert [start for start, end in ALLOWED if end is Phase.GATHERING] == [Phase.SHARDED]
