"""Compares what offload to the host costs and saves: hf_zero, DeepSpeed ZeRO-Offload and FSDP2 in one run.

    python -m benchmarks.offload --json out.json

See `benchmarks/README.md` for what each figure means; `benchmarks/placement.py` says which bytes are the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import Namespace

from benchmarks.compare import add_arguments, checked, measure, present_modes, set_environment, workloads
from benchmarks.counters import BUS_WAYS
from benchmarks.machine import describe_machine, one_line
from benchmarks.names import parse_mode
from benchmarks.report import MIB, markdown, summarize, time_table
from benchmarks.workload import SIZES


_AWAY = "hf_zero-2@offload=optimizer"
MODES = (
    "hf_zero-2",
    _AWAY,
    "hf_zero-2@in_backward=True",  # on the device: without clipping, and nothing else
    f"{_AWAY}@in_backward=True",
    "hf_zero-3@offload=params",
    "fsdp2",
    "fsdp2-offload",
    "deepspeed-offload-2",
    "deepspeed-offload-3",
)
REFERENCES = ("fsdp2-offload", "deepspeed-offload-2", "deepspeed-offload-3", "hf_zero-2")
CAPTION = (
    "MiB of the rank that has most. Host: tensors that offload puts into main memory (masters, state, gradients "
    "between backward and update, parameters, staging). Device: the peak of all others. Down, up: bytes over the bus "
    "per parameter and step, of all ranks."
)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    os.environ.setdefault("DS_BUILD_OPS", "0")
    report = {"machine": describe_machine(), "settings": vars(options) | {"json": None}, "results": {}}
    print(one_line(report["machine"]))
    modes, failed = present_modes(options.modes), False
    for num_ranks in options.worlds:
        own = _of_world(options, num_ranks)
        set_environment(own)
        for workload in workloads(own):
            raw = measure(modes, workload, own)
            summary = summarize(raw, own.compare, losses_of)
            report["results"][f"{workload.dtype}, {num_ranks} ranks"] = {"raw": raw, "summary": summary}
            _print_tables(workload.dtype, raw, summary, own)
            failed = failed or any(entry["error"] for entry in raw.values())
            if own.json:
                own.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__.splitlines()[0])
    add_arguments(parser, modes=",".join(MODES), references=",".join(REFERENCES))
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks, each in its turn (default: %(default)s)")
    parser.set_defaults(dtype="both", seq=128, rounds=3, steps=3, threads=0, num_processes=0)
    options = checked(parser, parser.parse_args(argv))
    options.worlds = [int(number) for number in options.worlds.split(",")]
    return options


def _of_world(options: Namespace, num_ranks: int) -> Namespace:
    """Each rank has its share of the cores, unless the user gave a number of threads."""
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return Namespace(**(vars(options) | {"num_processes": num_ranks, "threads": threads}))


def losses_of(name: str) -> str:
    """A mode's losses are those of hf_zero without offload; where it does not clip, without clipping either."""
    return "hf_zero-2@in_backward=True" if parse_mode(name).options.get("in_backward") else "hf_zero-2"


def _print_tables(dtype: str, raw: dict, summary: dict, options: Namespace) -> None:
    size = SIZES[options.size]
    print(
        f"\n## {dtype}: {options.size} ({size.num_parameters / 1e6:.1f} M), {options.num_processes} ranks of "
        f"{options.threads} threads, {options.accumulate} x {options.batch} x {options.seq} tokens per rank and step, "
        f"{options.rounds} rounds of {options.steps} steps\n"
    )
    print(f"{time_table(summary, 'loss - hf_zero')}\n\n{steps_table(summary, options.compare)}\n")
    print(f"{places_table(summary, size.num_parameters)}\n\n{CAPTION}")
    for name, entry in raw.items():
        if entry["error"]:
            print(f"\n{name} failed: {entry['error'].strip().splitlines()[-1]}")


def steps_table(summaries: dict[str, dict], references: list[str]) -> str:
    """Step times over several references, taken within rounds; below 1 is better."""
    references = [name for name in references if name in summaries]
    rows = []
    for name, summary in summaries.items():
        found = [summary["ratios"].get(reference) for reference in references]
        cells = [f"{r['step']:.3f} ({r['step_min']:.3f}-{r['step_max']:.3f})" if r else "1" for r in found]
        rows.append([name, *cells])
    return markdown(["step", *(f"/ {name}" for name in references)], rows)


def places_table(summaries: dict[str, dict], num_parameters: int) -> str:
    rows = []
    for name, summary in summaries.items():
        device, host, bus = summary["device_peak_nbytes"], summary["host_nbytes"], summary["bus_nbytes"]
        moved = [f"{bus[way] / num_parameters:.2f}" if bus else "-" for way in reversed(BUS_WAYS)]
        peak = ["-", "-"] if device is None else [_mib(device), f"{device / num_parameters:.2f}"]
        rows.append([name, *peak, _mib(host), f"{host / num_parameters:.2f}", *moved])
    header = ["mode", "device MiB", "bytes per parameter", "host MiB", "bytes per parameter", "down", "up"]
    return markdown(header, rows)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}" if nbytes < 100 * MIB else f"{nbytes / MIB:.0f}"


if __name__ == "__main__":
    sys.exit(main())
