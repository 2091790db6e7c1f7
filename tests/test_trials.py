"""The script of trials works: a few of those that take seconds. docs/reliability.md has what hundreds found."""

import random
from pathlib import Path

import pytest

from tests.trials.damage import EDITS, NUMBERS, damage
from tests.trials.kills import AT_CALLS, AT_RANDOM, kills
from tests.trials.runs import incomplete_in, unbroken
from tests.trials.table import Count, table


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return unbroken(tmp_path_factory.mktemp("trials"))


@pytest.mark.full("slow")
def test_ranks_that_are_killed_are_counted_and_nothing_is_lost(tmp_path, whole):
    counts = kills(tmp_path / "kills", whole, 2, random.Random(0))
    assert counts[AT_RANDOM].trials + counts[AT_CALLS].trials >= 2
    for kind in (AT_RANDOM, AT_CALLS):
        assert counts[kind].is_clean and counts[kind].survived == counts[kind].trials


@pytest.mark.full("slow")
def test_every_edit_of_a_manifest_is_tried(tmp_path, whole):
    count = damage(tmp_path / "damage", whole, 1, random.Random(0))[NUMBERS]
    assert count.trials == len(EDITS) and count.hung == 0


@pytest.mark.full("slow")
def test_a_checkpoint_that_is_not_whole_is_found(whole):
    out = whole / "out"
    assert incomplete_in(out) == []
    kept = (out / "checkpoint-6" / "scheduler.pt").read_bytes()
    (out / "checkpoint-6" / "scheduler.pt").write_bytes(b"")
    try:
        assert len(incomplete_in(out)) == 1
    finally:
        (out / "checkpoint-6" / "scheduler.pt").write_bytes(kept)


@pytest.mark.quick
def test_the_table_says_what_was_lost():
    assert (
        table({"kills": Count(trials=3, survived=2, lost=1)}).splitlines()[-1]
        == "| kills | 3 | 2 | 0 | 1 | 0 | 0 | 0 |"
    )
    assert Count(trials=3, survived=2, refused=1).is_clean and not Count(unnoticed=1).is_clean
