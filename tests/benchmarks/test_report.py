"""Names and summaries, on made-up numbers."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from benchmarks import curves, growth
from benchmarks.modes import ModeName, parse_mode
from benchmarks.report import bytes_table, ratios_table, summarize, time_table, worst
from benchmarks.workload import SIZES, Workload


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


def test_losses_are_averaged_over_ranks_and_over_each_part_of_the_steps():
    ranks = [
        {"losses": [float(start + step) for step in range(12)], "as_trained": 3.0, "exact": 2.5} for start in (0, 2)
    ]
    lines = curves.table({"fp32": curves.summary(ranks), "int8": curves.summary(ranks[:1])}).splitlines()
    assert lines[0] == "| loss of steps | fp32 | int8 |"
    assert lines[2] == "| 1 to 2 | 1.500 | 0.500 |" and lines[7] == "| 11 to 12 | 11.500 | 10.500 |"
    assert lines[8:] == ["| held-out page | 3.000 | 3.000 |", "| held-out page, exact parameters | 2.500 | 2.500 |"]


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


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_they_claim(size):
    model = Workload(size=size).build_model("meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[size].num_parameters


def test_batches_depend_on_seed_rank_and_step_alone():
    workload = Workload(size="smoke", seq=16, accumulate=2)
    first, second = (workload.micro_batches(1, 3) for _ in range(2))
    assert all(bool((a["input_ids"] == b["input_ids"]).all()) for a, b in zip(first, second, strict=True))
    assert not bool((first[0]["input_ids"] == workload.micro_batches(0, 3)[0]["input_ids"]).all())


# Lines of the page's table, and the modes that were measured.
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
    root = Path(__file__).parents[2]
    rates = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
    measured = {}
    for rate in rates:
        report = json.loads((root / "benchmarks" / "results" / f"2026-11-26-hosts-{rate}.json").read_text())
        measured[rate] = report["results"][f"{rate}, fp32"]
    lines = [
        f"| | MiB | {' | '.join(f'{name}: s | of DDP' for name in rates.values())} |",
        "|---|--:|" + "--:|--:|" * len(rates),
    ]
    for name, mode in SLOW_LINKS.items():
        sent = max(rank["left_host_nbytes"] for rank in measured["1gbit"]["raw"][mode]["bytes"])
        cells = [f"{sent / 2**20:.0f}"]
        for rate in measured.values():
            seconds, of_ddp = (rate["summary"][each]["step_seconds"] for each in (mode, "ddp"))
            cells += [f"{seconds:.2f}", f"{seconds / of_ddp:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    page = root / "docs" / "multi-node.md"
    check_part(page, "slow links", "\n".join(lines))


def test_the_page_has_the_table_and_the_picture_of_the_losses_that_were_kept(check_part):
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("figure", root / "docs" / "figures" / "curves.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    measured = json.loads(figure.RESULTS.read_text(encoding="utf-8"))["ways"]
    ways = {name: way for name, way in measured.items() if name in curves.WAYS}
    page = root / "benchmarks" / "README.md"
    check_part(page, "losses of rounded values", curves.table(ways))
    assert (root / "docs" / "figures" / "curves.svg").read_text(encoding="utf-8") == figure.draw()
    assert set(figure.COLORS) <= set(ways)


def test_the_page_has_the_starts_that_were_kept(check_part):
    root = Path(__file__).parents[2]
    kept = json.loads((root / "benchmarks" / "results" / "2026-11-24-growth.json").read_text(encoding="utf-8"))
    check_part(root / "benchmarks" / "README.md", "starts", growth.table(kept["start"]))
