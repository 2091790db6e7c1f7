"""Counting the bytes of long sequences, at a size that says nothing about them."""

import json
import mmap
from pathlib import Path

import pytest
import torch

from benchmarks import counters, long, long_worker
from benchmarks.launch import run_group
from benchmarks.modes import parse_mode
from benchmarks.workload import Workload
from hf_zero.comm import Bus, Counters
from hf_zero.config import ZeroSettings
from tests.benchmarks.test_programs import run_here


ROOT = Path(__file__).parents[2]
FLAGS = "hf_zero-3@chunked_loss=on@offload_activations=True@sequence_parallel=2+checkpointing"
PAGES, HUGE_PAGE = 2**16, 2**21  # shared memory is counted in pages


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
        # the inputs of all blocks but the last, and not the 64 MiB by which the memory for them grows; and the page
        # with the digests of a batch, which ranks that share sequences compare
        offloaded = 7 * length // 2 * 256 * 4 + 4096 if mode == FLAGS else 0
        assert computed[0]["hosts"][length] == skipped[0]["hosts"][length]
        # where the system has huge pages, they count whole
        assert offloaded <= computed[0]["hosts"][length] <= offloaded + (HUGE_PAGE if offloaded else 0)
    assert computed[0]["peaks"][512] > computed[0]["peaks"][256]


def test_memory_on_the_host_counts_as_far_as_it_was_written(monkeypatch):
    monkeypatch.setattr(
        mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE
    )  # a huge page counts whole, and may begin anywhere
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
    assert sorted(long.DEFAULT_MODES) == sorted(LADDER.values())
    assert parse_mode(FLAGS).options == {"chunked_loss": "on", "offload_activations": True, "sequence_parallel": 2}
    assert parse_mode(FLAGS).checkpointing and parse_mode("fsdp2+checkpointing").checkpointing


RAW = "2026-11-23-long.json"
SIZES = {"128,256 words": "small-128k", "32,000 words": "small"}
PAGE_SIZE = "128,256 words"  # the table of docs/long.md; benchmarks/README.md has the other
# Lines of the page's ladder, and the modes that were measured.
_CHUNKED = "hf_zero-3@chunked_loss=auto"
_TILED = f"{_CHUNKED}@tiled_mlp=auto"
_OFFLOADED = f"{_TILED}@offload_activations=True"
LADDER = {
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "FSDP2, checkpointing": "fsdp2+checkpointing",
    "DeepSpeed 3": "deepspeed-3",
    "DeepSpeed 3, its tiled loss, checkpointing": "deepspeed-tiled-3+checkpointing",
    "DeepSpeed 3, its tiled loss, checkpointing, Ulysses over both ranks": "deepspeed-ulysses-3+checkpointing",
    "`--zero_stage 3 --zero_chunked_loss off`": "hf_zero-3",
    "stage 3 with the chunked loss, which `auto` sets": _CHUNKED,
    "chunked loss, `--zero_tiled_mlp auto`": _TILED,
    "chunked loss, `--zero_offload_activations`": f"{_CHUNKED}@offload_activations=True",
    "chunked loss, `--zero_sequence_parallel 2`": f"{_CHUNKED}@sequence_parallel=2",
    "chunked loss, `--gradient_checkpointing`": f"{_CHUNKED}+checkpointing",
    "chunked loss, checkpointing, tiled MLP": f"{_TILED}+checkpointing",
    "chunked loss, checkpointing, tiled MLP, offloaded activations": f"{_OFFLOADED}+checkpointing",
    "chunked loss, checkpointing, tiled MLP, offloaded activations, two ranks to a sequence": (
        f"{_OFFLOADED}@sequence_parallel=2+checkpointing"
    ),
}


def counted(size: str) -> dict[str, dict]:
    """What was measured of each line of the ladder."""
    raw = json.loads((ROOT / "benchmarks" / "results" / RAW).read_text())
    assert raw["settings"]["budget_mib"] == 2048 and raw["settings"]["num_processes"] == 2
    entries = raw["results"].get(SIZES[size], {}).get("counted", {})
    return {mode: entries[mode] for mode in LADDER.values() if mode in entries}


def longest(entry: dict, reference: dict) -> tuple[str, str]:
    if not entry["longest"]:
        return "none", "-"
    more = "" if entry["is_bounded"] else "≥ "
    return f"{more}{entry['longest']:,}", f"{more}{entry['longest'] / reference['longest']:.1f}"


@pytest.mark.parametrize("size", SIZES)
def test_the_ladder_of_the_page_is_what_was_measured(check_part, size):
    entries = counted(size)
    lengths = (512, 2048, 4096, 8192, 16384)
    shape = Workload(size=SIZES[size]).shape
    millions = shape.num_parameters / 1e6
    lines = [f"With {size} ({millions:.1f} M parameters, hidden size {shape.hidden}, {shape.layers} blocks):", ""]
    lines.append(f"| set | longest sequence | of FSDP2's | MiB at {' | '.join(f'{length:,}' for length in lengths)} |")
    lines.append(f"|---{'|--:' * (2 + len(lengths))}|")
    for line, mode in LADDER.items():
        if mode in entries:
            peaks = [entries[mode]["peaks"].get(str(length)) for length in lengths]
            cells = [line, *longest(entries[mode], entries["fsdp2"])]
            cells += ["-" if peak is None else f"{peak / 2**20:,.0f}" for peak in peaks]
            lines.append(f"| {' | '.join(cells)} |")
    page = ROOT / "docs" / "long.md" if size == PAGE_SIZE else ROOT / "benchmarks" / "README.md"
    check_part(page, f"ladder {size}", "\n".join(lines) if entries else "")


@pytest.mark.parametrize("size", SIZES)
def test_flags_reach_what_they_are_for(size):
    """6 times FSDP2's length, and 0.55 of the activations where two ranks share each sequence."""
    entries = counted(size)
    if not entries:
        pytest.skip("not counted")
    assert entries[list(LADDER.values())[-1]]["longest"] >= 6 * entries["fsdp2"]["longest"]
    whole, shared = (
        entries[mode]["peaks"]["8192"] - entries[mode]["peaks"]["4096"]
        for mode in (_CHUNKED, f"{_CHUNKED}@sequence_parallel=2")
    )
    assert shared <= 0.55 * whole
