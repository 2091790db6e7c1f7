"""Summaries, on made-up numbers."""

import math

import pytest

from benchmarks.report import bytes_table, ratios_table, summarize, time_table, worst


pytestmark = pytest.mark.quick


def rank(seconds: list[float], losses: list[float]) -> dict:
    phases = [{"forward": 0.1, "backward": 0.2, "optimizer": 0.3} for _ in seconds]
    times = {"step_seconds": seconds, "phases": phases, "cpu_seconds": 1.0}
    return times | {"losses": losses, "resident_peak_nbytes": 100}


def counted(nbytes: int) -> dict:
    span = dict.fromkeys(("start_nbytes", "end_nbytes"), nbytes)
    wire = {"written_nbytes": nbytes, "engine_counters": {}}
    return {"tensors": span | {"peak_nbytes": 2 * nbytes}, "shared_nbytes": 0, "host_nbytes": 0, **wire}


def raw(rounds: list[list[float]], losses: list[float], nbytes: int) -> dict:
    ranks = [[rank(seconds, losses), rank([value / 2 for value in seconds], losses)] for seconds in rounds]
    return {"rounds": ranks, "bytes": [counted(nbytes), counted(nbytes)], "error": None}


def test_ratios_are_taken_within_a_round_and_a_step_lasts_as_long_as_its_slowest_rank():
    modes = {
        "ddp": raw([[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]], [3.0], 100),
        "fsdp2": raw([[2.0, 2.0], [20.0, 20.0], [5.0, 5.0]], [3.5], 50),
        "plain": {"rounds": [], "bytes": None, "error": "broken"},
    }
    summaries = summarize(modes, ["ddp", "plain"])
    assert list(summaries) == ["ddp", "fsdp2"]
    assert summaries["fsdp2"]["step_seconds"] == 5.0
    assert summaries["fsdp2"]["ratios"]["ddp"]["step"] == 2.0
    assert summaries["fsdp2"]["ratios"]["ddp"]["step_max"] == 2.5
    assert summaries["fsdp2"]["ratios"]["ddp"]["peak"] == 0.5
    assert summaries["fsdp2"]["loss_difference"] == 0.5
    for table in (time_table(summaries), bytes_table(summaries), ratios_table(summaries, "ddp")):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_worst_is_not_blind_to_nan():
    assert math.isnan(worst([1.0, math.nan, 2.0]))
