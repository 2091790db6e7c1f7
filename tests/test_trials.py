"""The script of trials works: a few of those that take seconds. docs/reliability.md has what hundreds found."""

import random
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.trials.damage import EDITS, NEWEST, NUMBERS, _flip, _train_to, _trials, damage
from tests.trials.kills import AT_CALLS, AT_RANDOM, kills
from tests.trials.runs import NUM_RANKS, incomplete_in, unbroken
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
def test_a_change_that_a_run_warns_of_is_noticed(tmp_path, whole):
    run_ranks(_train_to, NUM_RANKS, str(tmp_path / "source"), NEWEST, timeout=120)
    count = _trials(tmp_path, tmp_path / "source", whole, [_flip(Path("training_args.bin"), 0.5)])
    assert count.trials == count.survived == 1 and count.is_clean


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
