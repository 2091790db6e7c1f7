"""Reports: raw numbers as JSON, medians, ratios within one round, and Markdown tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from benchmarks.machine import describe_machine, one_line


MIB, GIB = 2**20, 2**30
BUS_WAYS = ("up", "down")  # verbs of copies between host and device, which reach no other rank
PHASES = ("forward", "backward", "optimizer")
Raw = dict  # of one mode: {"rounds": [[rank, ...], ...], "bytes": [rank, ...], "error": None | str}


class Report:
    """What a program writes to its `--json`: machine, settings and results. Prints one line about the machine."""

    def __init__(self, options: argparse.Namespace, **machine: str) -> None:
        settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        self.results: dict = {}
        self._path = options.json
        self._content = {"machine": describe_machine() | machine, "settings": settings, "results": self.results}
        print(one_line(self._content["machine"]))

    def write(self) -> None:
        """Called after each part, so that an interrupted run keeps what it has."""
        if self._path:
            self._path.write_text(json.dumps(self._content, indent=1) + "\n")


def summarize(
    modes: dict[str, Raw], references: list[str], losses_of: Callable[[str], str] = lambda name: "ddp"
) -> dict[str, dict]:
    """A summary per mode that has results; ratios against the references that have some too.

    Args:
        modes: the raw numbers.
        references: modes to give ratios against.
        losses_of: with which mode's losses a mode's are compared.
    """
    summaries = {name: _summarize_mode(raw) for name, raw in modes.items() if not raw["error"]}
    for name, summary in summaries.items():
        summary["ratios"] = {
            reference: _ratios(summary, summaries[reference])
            for reference in references
            if reference in summaries and reference != name
        }
    _compare_losses(modes, summaries, losses_of)
    return summaries


def _summarize_mode(raw: Raw) -> dict:
    """Medians over rounds of each round's median; a step takes as long as its slowest rank, bytes are the largest."""
    rounds = [round_median(ranks, "step_seconds") for ranks in raw["rounds"]]
    everyone = [rank for ranks in raw["rounds"] for rank in ranks]
    tensors = [rank["tensors"] for rank in raw["bytes"]]
    known = all(tensors)
    counters = [rank["engine_counters"] for rank in raw["bytes"]]
    counted = [sum(value for name, value in own.items() if name not in BUS_WAYS) if own else None for own in counters]
    return {
        "step_seconds": median(rounds),
        "step_seconds_min": min(rounds),
        "step_seconds_max": max(rounds),
        "step_seconds_per_round": rounds,
        "phases": {phase: median(step[phase] for rank in everyone for step in rank["phases"]) for phase in PHASES},
        "cpu_seconds": median(sum(rank["cpu_seconds"] for rank in ranks) / len(ranks) for ranks in raw["rounds"]),
        "resident_peak_nbytes": max(rank["resident_peak_nbytes"] for rank in everyone),
        "rest_nbytes": max(span["end_nbytes"] for span in tensors) if known else None,
        "peak_nbytes": max(span["peak_nbytes"] for span in tensors) if known else None,
        "shared_nbytes": max(rank["shared_nbytes"] for rank in raw["bytes"]),
        "wire_nbytes": max(rank["written_nbytes"] for rank in raw["bytes"]),
        "counted_nbytes": max(counted) if None not in counted else None,
        "host_nbytes": max(rank["host_nbytes"] for rank in raw["bytes"]),
        "device_peak_nbytes": device_peak_nbytes(raw["bytes"]),
        # of all ranks, since each moves its own shards
        "bus_nbytes": {way: sum(own.get(way, 0) for own in counters) for way in BUS_WAYS} if any(counters) else None,
    }


def device_peak_nbytes(ranks: list[dict]) -> int | None:
    """Peak device memory of the rank that has most, from the results of `worker.count_bytes`.

    On a GPU it is that of its allocator. On a CPU it is the peak of all tensors and shared memory minus the host's
    bytes, which favors modes that free gradients between steps, because not all host tensors may exist at their peak.
    It is None if tensors were not counted.
    """
    peaks = [rank.get("device_peak_nbytes") for rank in ranks]
    if None in peaks:
        if not all(rank["tensors"] for rank in ranks):
            return None
        # not all that a mode has on the host is counted as tensors
        peaks = [
            rank["tensors"]["peak_nbytes"] + rank["shared_nbytes"] + rank.get("mapped_nbytes", 0) - rank["host_nbytes"]
            for rank in ranks
        ]
    return max(0, *peaks)


def round_median(ranks: list[dict], key: str) -> float:
    return median(max(step) for step in zip(*(rank[key] for rank in ranks), strict=True))


def _ratios(summary: dict, reference: dict) -> dict:
    """Step times are compared within each round, so that a slow minute of the machine weighs on both sides."""
    pairs = zip(summary["step_seconds_per_round"], reference["step_seconds_per_round"], strict=True)
    per_round = [mine / theirs for mine, theirs in pairs]
    ratios = {"step": median(per_round), "step_min": min(per_round), "step_max": max(per_round)}
    for name in ("cpu_seconds", "rest_nbytes", "peak_nbytes", "wire_nbytes", "resident_peak_nbytes"):
        mine, theirs = _held(summary, name), _held(reference, name)
        ratios[name.removesuffix("_nbytes").removesuffix("_seconds")] = mine / theirs if mine and theirs else None
    return ratios


def _held(summary: dict, name: str) -> float | None:
    """Tensor bytes compare with the shared memory added, wherever a mode keeps its buffers."""
    value = summary[name]
    if value is not None and name in ("rest_nbytes", "peak_nbytes"):
        value += summary["shared_nbytes"]
    return value


def _compare_losses(modes: dict[str, Raw], summaries: dict[str, dict], losses_of: Callable[[str], str]) -> None:
    """Largest difference of any rank's loss at any step of the first round, against another mode's."""
    for name, summary in summaries.items():
        ranks = modes[name]["rounds"][0]
        reference = modes[losses_of(name)]["rounds"][0] if losses_of(name) in summaries else None
        summary["last_loss"] = ranks[0]["losses"][-1]
        summary["loss_difference"] = _loss_difference(ranks, reference) if reference else None


def _loss_difference(ranks: list[dict], reference: list[dict]) -> float:
    return worst(
        abs(mine - theirs)
        for rank, other in zip(ranks, reference, strict=True)
        for mine, theirs in zip(rank["losses"], other["losses"], strict=True)
    )


def worst(differences: Iterable[float]) -> float:
    """The largest, where a NaN is larger than anything (`max` would pass over it)."""
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def time_table(summaries: dict[str, dict]) -> str:
    header = ["mode", "step ms", "min-max", "forward", "backward", "optimizer", "CPU ms", "last loss", "difference"]
    rows = []
    for name, summary in summaries.items():
        least, most = _ms(summary["step_seconds_min"]), _ms(summary["step_seconds_max"])
        difference = summary["loss_difference"]
        rows.append([
            name,
            _ms(summary["step_seconds"]),
            f"{least}-{most}",
            *(_ms(summary["phases"][phase]) for phase in PHASES),
            _ms(summary["cpu_seconds"]),
            f"{summary['last_loss']:.5f}",
            "-" if difference is None else f"{difference:.1e}",
        ])  # fmt: skip
    return markdown(header, rows)


def bytes_table(summaries: dict[str, dict]) -> str:
    """MiB of the rank that has most."""
    keys = ("rest_nbytes", "peak_nbytes", "shared_nbytes", "resident_peak_nbytes", "wire_nbytes", "counted_nbytes")
    rows = [[name, *(mib(summary[key]) for key in keys)] for name, summary in summaries.items()]
    return markdown(["mode", "rest MiB", "peak", "shared", "resident", "sent", "counted"], rows)


def ratios_table(summaries: dict[str, dict], reference: str) -> str:
    """Every mode over one reference; below 1 is better."""
    header = [f"/ {reference}", "step (min-max)", "CPU", "rest", "peak", "wire", "resident"]
    rows = []
    for name, summary in summaries.items():
        ratios = summary["ratios"].get(reference)
        if ratios is None:
            continue
        cells = [_ratio(ratios[key]) for key in ("cpu", "rest", "peak", "wire", "resident_peak")]
        step = f"{ratios['step']:.3f} ({ratios['step_min']:.3f}-{ratios['step_max']:.3f})"
        rows.append([name, step, *cells])
    return markdown(header, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 3}f}"


def mib(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / MIB:.1f}" if nbytes < 100 * MIB else f"{nbytes / MIB:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def print_failures(entries: dict[str, dict]) -> None:
    for name, entry in entries.items():
        if entry.get("error"):
            print(f"\n{name} failed: {entry['error'].strip().splitlines()[-1]}")
