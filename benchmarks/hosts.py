"""Compares training modes on several hosts whose network is slow.

    python -m benchmarks.hosts --json out.json

The hosts are namespaces of this machine, connected by a bridge; what each sends is limited to a rate. See
`benchmarks/README.md` for what each figure means and how it is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from benchmarks.compare import add_arguments, checked, measure, present_modes, set_environment, workloads
from benchmarks.machine import describe_machine, one_line
from benchmarks.report import MIB, markdown, summarize
from benchmarks.workload import SIZES
from tests.hosts.network import Network, missing


MODES = (
    *("ddp", "fsdp2", "fsdp2-hybrid", "hf_zero-2", "hf_zero-2@shard_size=auto"),
    *("hf_zero-3", "hf_zero-3@shard_size=auto"),
    *("hf_zero-3@gather_dtype=int8", "hf_zero-3@gather_dtype=int8@reduce_dtype=int8"),
    *("hf_zero-2@reduce_dtype=int8", "hf_zero-2@shard_size=auto@reduce_dtype=int8"),
    "hf_zero-3@shard_size=auto@gather_dtype=int8@reduce_dtype=int8",
)
CAPTION = (
    "Seconds of a step, medians over rounds with the fastest and the slowest; MiB that leave a host in a step, packet "
    "headers included, of the host that sends most."
)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    reason = missing()
    if reason is not None:
        sys.exit(f"benchmarks.hosts: this machine can have no networks of its own: {reason}")
    set_environment(options)
    report = {"machine": describe_machine(), "settings": vars(options) | {"json": None}, "results": {}}
    print(one_line(report["machine"]))
    modes, failed = present_modes(options.modes), False
    for rate in options.rates:
        for workload in workloads(options):
            with Network(options.hosts) as network:
                network.throttle(rate)
                raw = measure(modes, workload, options, network.hosts)
            summary, load = summarize(raw, options.compare), os.getloadavg()
            report["results"][f"{rate}, {workload.dtype}"] = {"raw": raw, "summary": summary, "load_at_end": load}
            print(f"\n## {rate}, {workload.dtype}, {_described(options)}, load {load[1]:.1f}\n\n{table(raw, summary)}")
            failed = failed or any(entry["error"] for entry in raw.values())
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{CAPTION}")
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    add_arguments(parser, modes=",".join(MODES), references="ddp")
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rates", default="1gbit,200mbit", help="of each host's link, as `tc` reads it")
    # the link is to be what a step waits for: few tokens, few steps
    parser.set_defaults(size="mini", seq=64, num_processes=4, rounds=3, steps=2, warmup=1)
    options = checked(parser, parser.parse_args(argv))
    if options.num_processes % options.hosts:
        parser.error(f"--num_processes {options.num_processes}: is no multiple of {options.hosts} hosts")
    options.rates = options.rates.split(",")
    return options


def table(raw: dict, summary: dict) -> str:
    """One row for each mode that has results."""
    rows = []
    for name, told in summary.items():
        least, most = told["step_seconds_min"], told["step_seconds_max"]
        sent = max(rank["left_host_nbytes"] for rank in raw[name]["bytes"])
        ratio = told["ratios"].get("ddp")
        rows.append([
            name,
            f"{told['step_seconds']:.2f}",
            f"{least:.2f}-{most:.2f}",
            f"{ratio['step']:.2f}" if ratio else "1" if name == "ddp" else "-",
            f"{sent / MIB:.0f}",
            "-" if told["loss_difference"] is None else f"{told['loss_difference']:.1e}",
        ])  # fmt: skip
    return markdown(["mode", "step s", "min-max", "/ ddp", "MiB sent by a host", "loss - ddp"], rows)


def _described(options: argparse.Namespace) -> str:
    return (
        f"{options.size} ({SIZES[options.size].num_parameters / 1e6:.1f} M), {options.hosts} hosts x "
        f"{options.num_processes // options.hosts} ranks, {options.batch} x {options.seq} tokens per rank and step, "
        f"{options.rounds} rounds of {options.steps} steps"
    )


if __name__ == "__main__":
    sys.exit(main())
