"""Counting the bytes of long sequences, at a size that says nothing about them."""

import json

import pytest

from benchmarks import long
from benchmarks.launch import run_group
from benchmarks.names import parse_mode
from benchmarks.workload import Workload
from hf_zero.config import ZeroSettings
from tests.benchmarks.test_compare import run_here


FLAGS = "hf_zero-3@chunked_loss=on@sequence_parallel=2+checkpointing"


@pytest.mark.full("slow")
@pytest.mark.parametrize("mode", ["fsdp2", "hf_zero-3", FLAGS])
def test_bytes_are_the_same_when_tensors_are_not_computed(mode):
    spec = {"mode": mode, "workload": Workload(size="tiny", seq=64).to_dict(), "warmup": 2, "lengths": [256, 512]}
    spec |= {"budget_nbytes": 2**30, "most_nbytes": 1}  # no longer ones are tried
    computed, skipped = (
        run_group("benchmarks.long_worker:count_lengths", {**spec, "skips": skips}, num_processes=2, timeout=120)
        for skips in (0, long.SKIPPED_NUMEL)
    )
    assert computed[0]["peaks"].keys() == {256, 512}
    for length, peak in computed[0]["peaks"].items():
        # shared memory is counted in pages; FSDP2 frees a block's gradients when messages have come, soon or late
        assert skipped[0]["peaks"][length] == pytest.approx(peak, rel=0.02)
    assert computed[0]["peaks"][512] > computed[0]["peaks"][256]


@pytest.mark.full("slow")
def test_the_longest_sequence_within_a_budget_is_found(tmp_path):
    path, modes = tmp_path / "out.json", f"fsdp2,hf_zero-3,{FLAGS}"
    done = run_here(long.main, "--smoke", "--modes", modes, "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())["results"]["smoke"]
    budget = 3 * 2**20
    assert result["counted"]["fsdp2"]["is_bounded"]
    for entry in result["counted"].values():
        fitting = {int(length) for length, peak in entry["peaks"].items() if peak <= budget}
        assert entry["longest"] == max(fitting, default=0)
    assert result["counted"][FLAGS]["longest"] > result["counted"]["fsdp2"]["longest"]
    assert all(len(entry["rounds"]) == 1 for entry in result["timed"]["32"].values())
    assert "| within 3 MiB" in done.stdout and "| / fsdp2" in done.stdout


def test_the_modes_are_those_that_there_are():
    assert all(parse_mode(name).options.keys() <= ZeroSettings.__annotations__.keys() for name in long.DEFAULT_MODES)
    assert len(set(long.DEFAULT_MODES)) == len(long.DEFAULT_MODES)
    assert parse_mode(FLAGS).options == {"chunked_loss": "on", "sequence_parallel": 2}
    assert parse_mode(FLAGS).checkpointing and parse_mode("fsdp2+checkpointing").checkpointing


def test_settings_that_cannot_be_measured_are_refused():
    for arguments, reason in (
        (["--sizes", "huge"], "--sizes huge: the sizes are smoke"),
        (["--dtype", "both"], "--dtype both: one at a time"),
    ):
        done = run_here(long.main, *arguments)
        assert done.returncode == 2 and reason in done.stderr
