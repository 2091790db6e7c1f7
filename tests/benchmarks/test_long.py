"""Counting the bytes of long sequences, at a size that says nothing about them."""

import json
from pathlib import Path

import pytest

from benchmarks import long, long_worker
from benchmarks.launch import run_group
from benchmarks.workload import Workload
from tests.benchmarks.test_programs import run_here


ROOT = Path(__file__).parents[2]
FLAGS = "hf_zero-3@chunked_loss=on@offload_activations=True@sequence_parallel=2+checkpointing"
PAGES, HUGE_PAGE = 2**16, 2**21  # shared memory is counted in pages


@pytest.mark.full("slow")
@pytest.mark.parametrize("mode", ["fsdp2", "hf_zero-3", FLAGS])
def test_bytes_are_the_same_when_tensors_are_not_computed(mode):
    # a rank's part of a block's input is then large enough to be offloaded
    lengths = [2048, 4096] if mode == FLAGS else [256, 512]
    spec = {"mode": mode, "workload": Workload(size="tiny", seq=64).to_dict(), "warmup": 2, "lengths": lengths}
    spec |= {"budget_nbytes": 2**30, "most_nbytes": 2**40, "most_tokens": max(lengths)}
    computed, skipped = (
        run_group("benchmarks.long_worker:count_lengths", {**spec, "skips": skips}, num_processes=2, timeout=120)
        for skips in (0, long.SKIPPED_NUMEL)
    )
    assert [*computed[0]["peaks"]] == lengths
    for length, peak in computed[0]["peaks"].items():
        # FSDP2's peak is in the loss here. With checkpointing it is in the backward, and may be a block's gradients
        # more: gloo's thread lets go of what was reduced a moment after the wait for it has ended.
        assert skipped[0]["peaks"][length] == pytest.approx(peak, abs=PAGES)
        # the inputs of all blocks but the last, and not the 64 MiB by which the memory for them grows; and the page
        # with the digests of a batch, which ranks that share sequences compare
        offloaded = 7 * length // 2 * 256 * 4 + 4096 if mode == FLAGS else 0
        assert computed[0]["hosts"][length] == skipped[0]["hosts"][length]
        # where the system has huge pages, they count whole
        assert offloaded <= computed[0]["hosts"][length] <= offloaded + (HUGE_PAGE if offloaded else 0)
    assert computed[0]["peaks"][lengths[1]] > computed[0]["peaks"][lengths[0]]
    if mode == FLAGS:  # what is offloaded, 7 MiB more of the longer sequence, is not counted
        assert computed[0]["rests"][lengths[1]] == pytest.approx(computed[0]["rests"][lengths[0]], abs=HUGE_PAGE)


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


@pytest.mark.full("slow")
def test_the_longest_sequence_within_a_budget_is_found(tmp_path):
    path, modes = tmp_path / "out.json", f"fsdp2,hf_zero-3,{FLAGS}"
    done = run_here(long.main, "--smoke", "--modes", modes, "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())["results"]["smoke"]
    budget = 3 * 2**20
    assert result["counted"]["fsdp2"]["is_bounded"]
    for entry in result["counted"].values():
        fitting = {int(length) for length, peak in entry["peaks"].items() if peak <= budget}
        assert entry["longest"] == max(fitting, default=0)
    assert result["counted"][FLAGS]["longest"] > result["counted"]["fsdp2"]["longest"]
    assert "| within 3 MiB" in done.stdout and "| / fsdp2" in done.stdout and not result["timed"]
    done = run_here(long.main, "--smoke", "--modes", "fsdp2", "--times", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())["results"]["smoke"]
    assert len(result["timed"]["32"]["fsdp2"]["rounds"]) == 1 and not result["counted"]
