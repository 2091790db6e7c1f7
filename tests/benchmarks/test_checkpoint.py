"""The comparison of checkpoints end to end, at a size that says nothing about speed, and its arithmetic."""

import importlib.util
import json

import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint import summarize
from benchmarks.checkpoint_modes import CHECKPOINTS
from benchmarks.workload import SIZES
from tests.benchmarks.test_programs import run_module


NUM_PARAMETERS = SIZES["smoke"].num_parameters
PRESENT = [name for name in CHECKPOINTS if name != "deepspeed-3"]


def run_smoke(tmp_path, modes: list[str]) -> dict:
    path, folder = tmp_path / "out.json", tmp_path / "checkpoints"
    folder.mkdir()
    arguments = ["--smoke", "--modes", ",".join(modes), "--json", str(path), "--folder", str(folder)]
    done = run_module("benchmarks.checkpoint", *arguments, timeout=380)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    assert all(f"| {name} " in done.stdout for name in modes)
    return json.loads(path.read_text())["results"]["fp32"]["summary"]


def check_mode(summary: dict) -> None:
    """Every time is there and in order, and the load goes on with the losses of the run that saved."""
    seconds = summary["seconds"]
    assert 0 < seconds["stall"] <= seconds["complete"]
    assert 0 < seconds["pretrained"] and 0 < seconds["pretrained_durable"]
    assert seconds["resumed"] > 0
    assert all(difference <= 1e-5 for difference in summary["checks"].values()), summary["checks"]
    # The model and two moments, in fp32; names, steps and headers of this tiny model stay below its own size.
    assert 12 * NUM_PARAMETERS <= summary["folder_nbytes"] <= 24 * NUM_PARAMETERS
    assert summary["pretrained_nbytes"] >= 4 * NUM_PARAMETERS


@pytest.mark.timeout(420)
@pytest.mark.full("slow")  # it takes a minute
def test_every_mode_saves_loads_and_resumes(tmp_path):
    summary = run_smoke(tmp_path, PRESENT)
    assert list(summary["modes"]) == PRESENT
    for name in PRESENT:
        check_mode(summary["modes"][name])
    # Rank 0 gathers the two moments of every parameter.
    assert summary["modes"]["fsdp2-full"]["extra"]["tensors"] >= 8 * NUM_PARAMETERS
    # Each of two ranks keeps a copy of its half of weights and moments.
    assert summary["modes"]["dcp-async"]["extra"]["tensors_kept"] >= 6 * NUM_PARAMETERS
    assert summary["modes"]["hf_zero"]["extra"]["tensors"] < 4 * NUM_PARAMETERS
    assert summary["ratios"]["ddp"].keys() == {*checkpoint.SECONDS, *checkpoint.LOADS}


@pytest.mark.timeout(420)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (extra: bench)")
def test_deepspeed_saves_loads_and_resumes(tmp_path):
    summary = run_smoke(tmp_path, ["deepspeed-3"])
    check_mode(summary["modes"]["deepspeed-3"])


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
    summary = summarize(raw)
    assert list(summary["modes"]) == ["hf_zero", "ddp", "dcp"]
    assert summary["ratios"]["ddp"]["pretrained"] == 0.25 and summary["ratios"]["ddp"]["weights"] == 0.2
    assert summary["ratios"]["dcp"]["complete"] == 2.0 and summary["ratios"]["dcp"]["resumed"] == 0.25
    assert summary["modes"]["dcp"]["extra"]["tensors"] == 20
    assert summary["modes"]["ddp"]["seconds"]["durable"] == 16
    assert summary["modes"]["ddp"]["checks"] == {"load": 0.25}
