"""A package with one wait less is noticed: the simulated accelerator can tell, and every wait is needed.

`places.json` has each place with the training that notices it, or with the reason why nothing does. Three of them are
tried in the core; the tier `full` and `python -m tests.simulated --all` try all.
"""

import pytest

from tests.distributed import RemoteError
from tests.generated import check_part
from tests.simulated import table
from tests.simulated.mutants import mutants
from tests.simulated.table import PAGE, WAYS, equivalents, first_notice, known, page_part
from tests.simulated.training import SCENARIOS


# Of ranks that exchange messages, that share memory, and whose parameters rest on disk. One run tells of each.
FEW = (
    "Unit.reduce_gradients: pending.wait",
    "ZeroEngine._wait_for_readers: memory.barrier",
    "HostShard.all_gather: transfer.wait",
)
NOTICED = [mutant for mutant in mutants() if "how" in known().get(str(mutant), {})]
EQUIVALENT = [mutant for mutant in mutants() if str(mutant) in equivalents()]
WHAT_TO_DO = (
    "`python -m tests.simulated --renew` tries new or renamed places and writes the table; where "
    "nothing notices one, write a training (tests/simulated/training.py), delete the line that waits, or add "
    '"equivalent" with the reason'
)


@pytest.mark.quick
def test_the_table_has_each_place():
    names = [str(mutant) for mutant in mutants()]
    assert len(set(names)) == len(names)
    missing = [f"{mutant} ({mutant.file}:{mutant.line})" for mutant in mutants() if str(mutant) not in known()]
    assert not missing, f"{missing}: {WHAT_TO_DO}"
    gone = set(known()) - set(names)
    assert not gone, f"{sorted(gone)}: the package has them no more; `python -m tests.simulated --renew` drops them"
    for name, entry in known().items():
        reason = entry.get("equivalent") or entry.get("unnoticed")
        assert reason or (entry["training"] in SCENARIOS and entry["how"]), name


@pytest.mark.quick
def test_nearly_every_place_that_is_not_equivalent_is_noticed(request):
    assert len(NOTICED) >= 0.95 * (len(mutants()) - len(EQUIVALENT))
    check_part(PAGE, "places", page_part(), request.config.getoption("--write-docs"))


def test_some_waits_less_are_noticed():
    of_name = {str(mutant): mutant for mutant in NOTICED}
    for name in FEW:
        _assert_noticed(of_name[name])


@pytest.mark.full("slow")
@pytest.mark.parametrize("mutant", NOTICED, ids=str)
def test_each_wait_less_is_noticed(mutant):
    _assert_noticed(mutant)


@pytest.mark.full("slow")
@pytest.mark.parametrize("mutant", EQUIVALENT, ids=str)
def test_nothing_notices_what_is_equivalent(mutant):
    finding = first_notice(mutant, WAYS)
    assert finding is None or not finding.counts, f"{mutant}: {finding}; it is needed, so take its reason out"


WAITING = 'no answer within 60 s\n  File "/a/hf_zero/comm/base.py", line 7 in wait\n'


@pytest.mark.quick
@pytest.mark.parametrize(
    "first, second, how",
    [
        (("Timeout", WAITING), ("Timeout", WAITING), "hang"),
        (("Timeout", WAITING), None, table.UNCLEAR),  # the machine was too slow
        (("Timeout", WAITING), ("IndexError", "pop"), "error"),
        (("Timeout", "no answer within 60 s"), ("Timeout", "no answer within 60 s"), table.UNCLEAR),
        (("Died", "exit code -9"), ("Died", "exit code -9"), table.UNCLEAR),
        (("Died", "exit code -6"), ("UnpicklingError", "invalid load key"), "error"),
        (("OSError", "No space left"), None, table.UNCLEAR),
        (("IndexError", "pop"), ("IndexError", "pop"), "error"),
        (("NonFiniteError", "not finite"), ("NonFiniteError", "not finite"), "poison"),
        (("Race", "Race: two writes"), None, "race"),
    ],
)
def test_what_a_busy_machine_may_bring_about_counts_when_it_comes_twice(monkeypatch, first, second, how):
    outcomes = iter([first, None, second])

    def run_ranks(*args, **kwargs):
        outcome = next(outcomes)
        if outcome is not None:
            raise RemoteError(0, *outcome)
        return []

    monkeypatch.setattr(table, "run_ranks", run_ranks)
    monkeypatch.setattr(table, "known", dict)
    monkeypatch.setattr(table, "_facts", lambda way: [])
    monkeypatch.setattr(table, "reaches", lambda way: {str(mutants()[0])})
    finding = first_notice(mutants()[0], WAYS[:1])
    assert finding.how == how and finding.counts is (how != table.UNCLEAR)


def _assert_noticed(mutant):
    finding = first_notice(mutant, WAYS)
    assert finding is not None and finding.counts, f"{mutant} ({mutant.file}:{mutant.line}): {finding}; {WHAT_TO_DO}"
