"""Counting the bytes of long sequences, at a size that says nothing about them."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import counters, long, long_worker
from benchmarks.launch import run_group
from benchmarks.names import parse_mode
from benchmarks.workload import Workload
from hf_zero.comm import Bus, Counters
from hf_zero.config import ZeroSettings
from tests.benchmarks.test_compare import run_here
from tests.generated import check_part


ROOT = Path(__file__).parents[2]
FLAGS = "hf_zero-3@chunked_loss=on@offload_activations=True@sequence_parallel=2+checkpointing"
PAGES = 2**16  # shared memory is counted in pages


@pytest.mark.full("slow")
@pytest.mark.parametrize("mode", ["fsdp2", "hf_zero-3", FLAGS])
def test_bytes_are_the_same_when_tensors_are_not_computed(mode):
    spec = {"mode": mode, "workload": Workload(size="tiny", seq=64).to_dict(), "warmup": 2, "lengths": [256, 512]}
    spec |= {"budget_nbytes": 2**30, "most_nbytes": 2**40, "most_tokens": 512}
    computed, skipped = (
        run_group("benchmarks.long_worker:count_lengths", {**spec, "skips": skips}, num_processes=2, timeout=120)
        for skips in (0, long.SKIPPED_NUMEL)
    )
    assert computed[0]["peaks"].keys() == {256, 512}
    for length, peak in computed[0]["peaks"].items():
        # FSDP2's peak is in the loss here. With checkpointing it is in the backward, and may be a block's gradients
        # more: gloo's thread lets go of what was reduced a moment after the wait for it has ended.
        assert skipped[0]["peaks"][length] == pytest.approx(peak, abs=PAGES)
        # the inputs of all blocks but the last, and not the 64 MiB by which the memory for them grows
        offloaded = 7 * length // 2 * 256 * 4 if mode == FLAGS else 0
        assert computed[0]["hosts"][length] == skipped[0]["hosts"][length] == offloaded
    assert computed[0]["peaks"][512] > computed[0]["peaks"][256]


def test_memory_on_the_host_counts_as_far_as_it_was_written():
    bus = Bus(torch.device("cpu"), Counters())
    written, part, unwritten = (bus.empty(2**20, torch.uint8) for _ in range(3))
    written.fill_(1), part[: 2**18].fill_(1)
    assert counters.resident_nbytes_at(bus._memory) == 2**20 + 2**18
    assert bus.host_nbytes == 3 * 2**20
    del unwritten


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
    again = run_here(long.main, "--smoke", "--modes", modes, "--resume", "--json", str(path))
    assert again.returncode == 0 and "longest" not in again.stderr  # nothing is counted twice
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:]
    assert json.loads(path.read_text())["results"]["smoke"] == result
    done = run_here(long.main, "--smoke", "--modes", modes, "--resume", "--num_processes", "1", "--json", str(path))
    assert "num_processes 2, this run 1" in str(done.returncode)
    done = run_here(long.main, "--smoke", "--modes", "fsdp2", "--times", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())["results"]["smoke"]
    assert len(result["timed"]["32"]["fsdp2"]["rounds"]) == 1 and not result["counted"]


def test_the_modes_are_those_that_there_are():
    assert all(parse_mode(name).options.keys() <= ZeroSettings.__annotations__.keys() for name in long.DEFAULT_MODES)
    assert len(set(long.DEFAULT_MODES)) == len(long.DEFAULT_MODES)
    assert parse_mode(FLAGS).options == {"chunked_loss": "on", "offload_activations": True, "sequence_parallel": 2}
    assert parse_mode(FLAGS).checkpointing and parse_mode("fsdp2+checkpointing").checkpointing


def test_settings_that_cannot_be_measured_are_refused():
    for arguments, reason in (
        (["--sizes", "huge"], "--sizes huge: the sizes are smoke"),
        (["--dtype", "both"], "--dtype both: one at a time"),
    ):
        done = run_here(long.main, *arguments)
        assert done.returncode == 2 and reason in done.stderr


# Lines of the page's ladder, and the modes that were measured: the loss is chunked at all of these lengths by `auto`.
_CHUNKED, _TILED = "hf_zero-3@chunked_loss=on", "hf_zero-3@chunked_loss=auto@tiled_mlp=auto"
LADDER = {
    "FSDP2": "fsdp2",
    "FSDP2 with gradient checkpointing": "fsdp2+checkpointing",
    "`--zero_stage 3 --zero_chunked_loss off`": "hf_zero-3",
    "`--zero_chunked_loss auto`, the default of trainers": _CHUNKED,
    "the same with `--zero_sequence_parallel 2`": f"{_CHUNKED}@sequence_parallel=2",
    "the chunked loss and `--gradient_checkpointing`": f"{_CHUNKED}+checkpointing",
    "these two and `--zero_tiled_mlp auto`": f"{_TILED}+checkpointing",
    "the first two of these and `--zero_sequence_parallel 2`": f"{_CHUNKED}@sequence_parallel=2+checkpointing",
}


def test_the_ladder_of_the_page_is_what_was_measured(request):
    counted = {}
    for name in ("2026-11-23-long-small-128k.json", "2026-11-23-long-small-128k-flags.json"):
        raw = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        assert raw["settings"]["budget_mib"] == 2048 and raw["settings"]["num_processes"] == 2
        counted |= raw["results"]["small-128k"]["counted"]
    lines = ["| set | longest sequence | of FSDP2's | MiB at 2,048 | MiB at 8,192 |", "|---|--:|--:|--:|--:|"]
    for name, mode in LADDER.items():
        entry, more = counted[mode], "" if counted[mode]["is_bounded"] else "≥ "
        ratio = entry["longest"] / counted["fsdp2"]["longest"]
        peaks = (f"{entry['peaks'][at] / 2**20:,.0f}" if at in entry["peaks"] else "-" for at in ("2048", "8192"))
        lines.append(f"| {name} | {more}{entry['longest']:,} | {more}{ratio:.1f} | {' | '.join(peaks)} |")
    check_part(ROOT / "docs" / "long.md", "ladder", "\n".join(lines), request.config.getoption("--write-docs"))
    longest = [counted[mode]["longest"] for mode in LADDER.values()]
    assert longest[2:] == sorted(longest[2:])
