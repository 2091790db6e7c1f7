"""The trials of `python -m tests.trials` work. docs/reliability.md has what hundreds of them found."""

import random
from pathlib import Path

import pytest

from tests.tiers import more
from tests.trials.kills import AT_CALLS, AT_RANDOM, kills
from tests.trials.runs import incomplete_in, unbroken
from tests.trials.table import table


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return unbroken(tmp_path_factory.mktemp("trials"))


@pytest.mark.parametrize("num_kills", [4, *more(30)])
def test_ranks_that_are_killed_at_any_time_lose_nothing(tmp_path, whole, num_kills):
    counts = kills(tmp_path / "kills", whole, num_kills, random.Random(0))
    killed = counts[AT_RANDOM], counts[AT_CALLS]
    assert all(count.is_clean and count.survived for count in killed), table(counts)


def test_a_checkpoint_that_is_not_whole_is_found(whole):
    assert incomplete_in(whole / "out") == []
    (whole / "out" / "checkpoint-6" / "scheduler.pt").write_bytes(b"")
    assert len(incomplete_in(whole / "out")) == 1
