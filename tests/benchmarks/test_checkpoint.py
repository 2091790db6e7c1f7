"""The comparison of checkpoints end to end, at a size that says nothing about speed, and its arithmetic."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint_names import SAVING_MODES, why_left_out
from benchmarks.checkpoint_report import summarize
from benchmarks.workload import SIZES
from tests.benchmarks.test_compare import run_here, run_module


MIB = 2**20
NUM_PARAMETERS = SIZES["smoke"].num_parameters
PRESENT = [name for name, mode in SAVING_MODES.items() if mode.package is None and why_left_out(name) is None]


def run_smoke(tmp_path, modes: list[str]) -> dict:
    path, folder = tmp_path / "out.json", tmp_path / "checkpoints"
    folder.mkdir()
    arguments = ["--smoke", "--modes", ",".join(modes), "--json", str(path), "--folder", str(folder)]
    done = run_module("benchmarks.checkpoint", *arguments, timeout=380)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    assert all(f"| {name} " in done.stdout for name in modes)
    return json.loads(path.read_text())["results"]["fp32"]["summary"]


def check_mode(name: str, summary: dict) -> None:
    """Every time is there and in order, and every way to load goes on with the losses of the run that saved."""
    seconds = summary["seconds"]
    assert 0 < seconds["stall"] <= seconds["complete"]
    assert 0 < seconds["pretrained"] and 0 < seconds["pretrained_durable"]
    assert (seconds["lost"] is not None) == SAVING_MODES[name].is_async
    assert {loader.partition(",")[0] for loader in summary["loads"]} == set(SAVING_MODES[name].loaders)
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
        check_mode(name, summary["modes"][name])
    # Rank 0 gathers the two moments of every parameter.
    assert summary["modes"]["fsdp2-full"]["extra"]["tensors"] >= 8 * NUM_PARAMETERS
    # Each of two ranks keeps a copy of its half of weights and moments.
    assert summary["modes"]["dcp-async"]["extra"]["tensors_kept"] >= 6 * NUM_PARAMETERS
    assert summary["modes"]["hf_zero"]["extra"]["tensors"] < 4 * NUM_PARAMETERS
    assert {"pretrained", "pretrained_durable", "weights", "resumed", "extra_tensors"} <= summary["goals"].keys()


@pytest.mark.timeout(420)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (extra: bench)")
def test_deepspeed_saves_loads_and_resumes(tmp_path):
    summary = run_smoke(tmp_path, ["deepspeed-3"])
    check_mode("deepspeed-3", summary["modes"]["deepspeed-3"])


def test_a_mode_that_is_not_known_is_refused():
    done = run_here(checkpoint.main, "--modes", "ddp,fsdp3")
    assert done.returncode == 2
    assert "unknown mode 'fsdp3'; the modes are hf_zero" in done.stderr


def measured(stall: float, pretrained: float, complete: float, weights: float) -> dict:
    """One round of a mode whose second rank is always the later one."""

    def save(factor: float) -> dict:
        seconds = {"stall": stall * factor, "pretrained": pretrained * factor, "complete": complete * factor}
        return {
            "seconds": seconds,
            "written_nbytes": 1,
            "dirtied_nbytes": 1,
            "folder_nbytes": 2,
            "pretrained_nbytes": 1,
        }

    saves = [{"first": save(f), "second": save(f), "durable": save(2 * f), "losses": [1.0, 1.0]} for f in (0.5, 1)]
    load = {"memory": {"resident_nbytes": 1}, "losses": [1.0, 1.25], "pretrained_loss": None}
    loads = [load | {"seconds": {"weights": weights * factor, "resumed": 2 * weights * factor}} for factor in (0.5, 1)]
    return {"saves": saves, "loads": {"load": {"warm": loads}}}


def raw_mode(tensors: int, rounds: list[dict]) -> dict:
    span = {"start_nbytes": 1, "peak_nbytes": 1 + tensors, "end_nbytes": 1}
    part = {"tensors": span, "owned_nbytes": tensors, "owned_kept_nbytes": 0, "resident_nbytes": tensors}
    return {"error": None, "load_errors": {}, "memory": [{"save": part, "convert": part}], "rounds": rounds}


def test_ratios_are_taken_within_rounds_against_the_best_peer():
    raw = {
        "hf_zero": raw_mode(10, [measured(4, 1, 4, 1), measured(8, 2, 8, 2), measured(4, 1, 4, 1)]),
        "ddp": raw_mode(0, [measured(8, 4, 8, 5), measured(16, 8, 16, 10), measured(8, 2, 8, 5)]),
        "dcp": raw_mode(20, [measured(2, 9, 2, 4), measured(4, 9, 4, 8), measured(2, 9, 2, 4)]),
        "fsdp2-full": raw_mode(5, []) | {"error": "broken"},
    }
    summary = summarize(raw)
    assert list(summary["modes"]) == ["hf_zero", "ddp", "dcp"]
    goals = summary["goals"]
    assert goals["pretrained"] == {"ratio": 0.25, "min": 0.25, "max": 0.5, "best": "ddp"}
    assert goals["weights"]["ratio"] == goals["resumed"]["ratio"] == 0.25
    assert goals["extra_tensors"] == {"ratio": 0.5, "min": 0.5, "max": 0.5, "best": "dcp"}
    assert "stall" not in goals  # there is no asynchronous mode
    assert summary["ratios"]["dcp"]["complete"] == 2.0
    assert summary["modes"]["dcp"]["seconds"]["conversion"] == 7
    assert summary["modes"]["ddp"]["seconds"]["durable"] == 16
    assert summary["modes"]["ddp"]["checks"] == {"load": 0.25}


HOLD_PAGES = """
import mmap, sys
with mmap.mmap(int(sys.argv[1]), 0) as pages:
    for start in range(0, len(pages), mmap.PAGESIZE):
        pages[start] = 1
    print("touched", flush=True)
    sys.stdin.read()
"""


# In an interpreter of its own, which has nothing else to free while it is measured.
MEASURE_PAGES = """
import json, mmap, sys, time
from benchmarks.process_memory import ProcessMemory
MIB = 2**20
with mmap.mmap(int(sys.argv[1]), 64 * MIB) as shared, mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE) as own:
    with ProcessMemory() as memory:
        for pages in (shared, own):
            for start in range(0, len(pages), mmap.PAGESIZE):
                pages[start] = 1
        time.sleep(0.3)
print(json.dumps({name: getattr(memory, name) for name in sys.argv[2].split(",")}))
"""


@pytest.mark.timeout(60)
def test_shared_pages_count_in_part_and_private_ones_whole():
    file = os.memfd_create("pages")
    os.ftruncate(file, 64 * MIB)
    command = [sys.executable, "-S", "-c", HOLD_PAGES, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[file], **pipes) as other:
        other.stdout.readline()
        names = "owned_nbytes,owned_kept_nbytes,resident_nbytes,num_samples"
        command = [sys.executable, "-c", MEASURE_PAGES, str(file), names]
        done = subprocess.run(command, pass_fds=[file], stdout=subprocess.PIPE, check=True)
        memory = json.loads(done.stdout)
        other.stdin.close()
    os.close(file)
    # 32 of the 64 MiB that two processes map, and 32 of its own; the resident set has all 96.
    assert 62 * MIB <= memory["owned_nbytes"] <= 68 * MIB
    assert 62 * MIB <= memory["owned_kept_nbytes"] <= 68 * MIB
    assert 94 * MIB <= memory["resident_nbytes"] <= 100 * MIB
    assert memory["num_samples"] >= 5
