"""The tables and the picture of docs/ that show raw numbers kept in benchmarks/results."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import long
from benchmarks.workload import SIZES, Workload


pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# The vocabularies and their sizes; docs/long.md has the table of the first, benchmarks/README.md that of the other.
VOCABULARIES = {"128,256 words": "small-128k", "32,000 words": "small"}
LENGTHS = (512, 2048, 4096, 8192, 16384)
_CHUNKED = "hf_zero-3@chunked_loss=auto"
_TILED = f"{_CHUNKED}@tiled_mlp=auto"
_OFFLOADED = f"{_TILED}@offload_activations=True"
# Lines of the ladder, and the modes that were measured.
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


def test_the_ladder_has_the_modes_of_the_program():
    assert sorted(long.DEFAULT_MODES) == sorted(LADDER.values())


@pytest.mark.parametrize("words", VOCABULARIES)
def test_the_ladder_is_what_was_measured(check_part, words):
    size = VOCABULARIES[words]
    entries = json.loads((RESULTS / "2026-11-23-long.json").read_text())["results"][size]["counted"]
    shape = Workload(size=size).shape
    millions = shape.num_parameters / 1e6
    lines = [f"With {words} ({millions:.1f} M parameters, hidden size {shape.hidden}, {shape.layers} blocks):", ""]
    lines.append(f"| set | longest sequence | of FSDP2's | MiB at {' | '.join(f'{length:,}' for length in LENGTHS)} |")
    lines.append(f"|---{'|--:' * (2 + len(LENGTHS))}|")
    for line, mode in LADDER.items():
        if mode in entries:
            longest, peaks = entries[mode]["longest"], entries[mode]["peaks"]
            more = "" if entries[mode]["is_bounded"] else "≥ "
            cells = [f"{more}{longest:,}", f"{more}{longest / entries['fsdp2']['longest']:.1f}"]
            cells = cells if longest else ["none", "-"]
            cells += [f"{peaks[str(length)] / 2**20:,.0f}" if str(length) in peaks else "-" for length in LENGTHS]
            lines.append(f"| {line} | {' | '.join(cells)} |")
    page = ROOT / "docs" / "long.md" if size == "small-128k" else ROOT / "benchmarks" / "README.md"
    check_part(page, f"ladder {words}", "\n".join(lines))


SLOW_LINKS = {
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "FSDP2, hybrid": "fsdp2-hybrid",
    "stage 2, a shard group per host": "hf_zero-2@shard_size=auto",
    "stage 3, one shard group": "hf_zero-3@shared_memory=False",
    "stage 3, a shard group per host": "hf_zero-3@shard_size=auto",
    "stage 3, a shard group per host, both int8": "hf_zero-3@shard_size=auto@gather_dtype=int8@reduce_dtype=int8",
    "stage 2, a shard group per host, `--zero_reduce_dtype int8`": "hf_zero-2@shard_size=auto@reduce_dtype=int8",
}


def test_the_table_of_slow_links_is_what_was_measured(check_part):
    rates = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
    reports = {rate: json.loads((RESULTS / f"2026-11-26-hosts-{rate}.json").read_text()) for rate in rates}
    measured = {rate: report["results"][f"{rate}, fp32"] for rate, report in reports.items()}
    lines = [f"| | MiB | {' | '.join(f'{name}: s | of DDP' for name in rates.values())} |"]
    lines.append("|---|--:|" + "--:|--:|" * len(rates))
    for name, mode in SLOW_LINKS.items():
        sent = max(rank["left_host_nbytes"] for rank in measured["1gbit"]["raw"][mode]["bytes"])
        cells = [f"{sent / 2**20:.0f}"]
        for rate in measured.values():
            seconds, of_ddp = (rate["summary"][each]["step_seconds"] for each in (mode, "ddp"))
            cells += [f"{seconds:.2f}", f"{seconds / of_ddp:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    check_part(ROOT / "docs" / "multi-node.md", "slow links", "\n".join(lines))


def test_the_picture_of_losses_is_drawn_from_those_that_were_kept():
    spec = importlib.util.spec_from_file_location("figure", ROOT / "docs" / "figures" / "curves.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert (ROOT / "docs" / "figures" / "curves.svg").read_text(encoding="utf-8") == figure.draw()


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_they_claim(size):
    model = Workload(size=size).build_model("meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[size].num_parameters
