"""Summaries, on made-up numbers."""

import math

import pytest

from benchmarks import long_worker
from benchmarks.checkpoint import summarize as summarize_checkpoints
from benchmarks.modes import ModeName, parse_mode
from benchmarks.report import bytes_table, ratios_table, summarize, time_table, worst
from benchmarks.workload import Workload


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


def test_mode_names():
    assert parse_mode("hf_zero-3@prefetch_units=2@fused=True") == ModeName(
        "hf_zero", 3, {"prefetch_units": 2, "fused": True}
    )
    assert parse_mode("hf_zero-2@offload_fraction=0.5@offload=optimizer").options["offload_fraction"] == 0.5
    assert parse_mode("fsdp2-hybrid") == ModeName("fsdp2-hybrid")
    assert parse_mode("deepspeed-offload-3") == ModeName("deepspeed-offload", 3)
    for wrong in ("hf_zero-4", "deepspeed", "ddp@x=1", ""):
        with pytest.raises(ValueError, match="unknown mode"):
            parse_mode(wrong)


def test_batches_depend_on_seed_rank_and_step_alone():
    workload = Workload(size="smoke", seq=16, accumulate=2)
    first, second = (workload.micro_batches(1, 3) for _ in range(2))
    assert all(bool((a["input_ids"] == b["input_ids"]).all()) for a, b in zip(first, second, strict=True))
    assert not bool((first[0]["input_ids"] == workload.micro_batches(0, 3)[0]["input_ids"]).all())


def measured(stall: float, pretrained: float, complete: float, weights: float) -> dict:
    """One round of a mode whose second rank is always the later one."""

    def save(factor: float) -> dict:
        seconds = {"stall": stall * factor, "pretrained": pretrained * factor, "complete": complete * factor}
        return {"seconds": seconds, "folder_nbytes": 2, "pretrained_nbytes": 1}

    saves = [{"second": save(f), "durable": save(2 * f), "losses": [1.0, 1.0]} for f in (0.5, 1)]
    load = {"losses": [1.0, 1.25], "pretrained_loss": None}
    loads = [load | {"seconds": {"weights": weights * factor, "resumed": 2 * weights * factor}} for factor in (0.5, 1)]
    return {"saves": saves, "load": loads}


def raw_mode(tensors: int, rounds: list[dict]) -> dict:
    span = {"start_nbytes": 1, "peak_nbytes": 1 + tensors, "end_nbytes": 1}
    return {"error": None, "memory": [{"tensors": span}], "rounds": rounds}


def test_ratios_are_taken_within_rounds():
    raw = {
        "hf_zero": raw_mode(10, [measured(4, 1, 4, 1), measured(8, 2, 8, 2), measured(4, 1, 4, 1)]),
        "ddp": raw_mode(0, [measured(8, 4, 8, 5), measured(16, 8, 16, 10), measured(8, 2, 8, 5)]),
        "dcp": raw_mode(20, [measured(2, 9, 2, 4), measured(4, 9, 4, 8), measured(2, 9, 2, 4)]),
        "fsdp2-full": raw_mode(5, []) | {"error": "broken"},
    }
    summary = summarize_checkpoints(raw)
    assert list(summary["modes"]) == ["hf_zero", "ddp", "dcp"]
    assert summary["ratios"]["ddp"]["pretrained"] == 0.25 and summary["ratios"]["ddp"]["weights"] == 0.2
    assert summary["ratios"]["dcp"]["complete"] == 2.0 and summary["ratios"]["dcp"]["resumed"] == 0.25
    assert summary["modes"]["dcp"]["extra"]["tensors"] == 20
    assert summary["modes"]["ddp"]["seconds"]["durable"] == 16
    assert summary["modes"]["ddp"]["checks"] == {"load": 0.25}


def test_a_length_that_was_not_tried_is_told_from_one_that_does_not_fit():
    def longest(nbytes: int, most_tokens: int) -> tuple[int, bool]:
        counted = long_worker._Counted(None, None, 2**40, most_tokens)
        counted.count = lambda length: counted.peaks.update({length: length}) or counted.residents.update({length: 0})
        for length in (512, 2048):
            counted.count(length)
        return long_worker._longest(counted, nbytes)

    assert longest(5000, 8192) == (4992, True)
    assert longest(100_000, 8192) == (8192, False)
    assert longest(300, 8192) == (256, True)
    assert longest(10, 8192) == (0, True)
