"""Compares training modes on several hosts whose network is slow.

    python -m benchmarks.hosts --json out.json

The hosts are namespaces of this machine, connected by a bridge with limited rates. See `benchmarks/README.md` for what
each number means and how it is measured.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.compare import compare, make_parser, parse, workloads
from benchmarks.launch import set_environment
from benchmarks.report import Report, markdown, mib
from tests.hosts.network import Network, missing


MODES = (
    *("ddp", "fsdp2", "fsdp2-hybrid", "hf_zero-2", "hf_zero-2@shard_size=auto"),
    *("hf_zero-3", "hf_zero-3@shard_size=auto"),
    *("hf_zero-3@gather_dtype=int8", "hf_zero-3@gather_dtype=int8@reduce_dtype=int8"),
    *("hf_zero-2@reduce_dtype=int8", "hf_zero-2@shard_size=auto@reduce_dtype=int8"),
    "hf_zero-3@shard_size=auto@gather_dtype=int8@reduce_dtype=int8",
)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if (reason := missing()) is not None:
        sys.exit(f"benchmarks.hosts: this machine cannot have networks of its own: {reason}")
    set_environment(options.threads, options.device)
    report, done = Report(options), True
    for rate in options.rates:
        for workload in workloads(options):
            key = f"{rate}, {workload.dtype}"
            with Network(options.hosts) as network:
                network.throttle(rate)
                done &= compare(report, key, workload, options, hosts=network.hosts, own_table=sent_table)
            report.results[key]["load_at_end"] = os.getloadavg()
            report.write()
    return 0 if done else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("hosts", __doc__, modes=",".join(MODES), references="ddp")
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rates", default="1gbit,200mbit", help="of each host's link, as `tc` reads it")
    # few tokens and steps, so that a step waits for the link
    parser.set_defaults(size="mini", seq=64, num_processes=4, rounds=3, steps=2, warmup=1)
    options = parse(parser, argv)
    if options.num_processes % options.hosts:
        parser.error(f"--num_processes {options.num_processes}: not a multiple of {options.hosts} hosts")
    options.rates = options.rates.split(",")
    return options


def sent_table(raw: dict, summary: dict) -> str:
    """MiB that leave a host in a step, of the host that sends most."""
    rows = [[name, mib(max(rank["left_host_nbytes"] for rank in raw[name]["bytes"]))] for name in summary]
    return markdown(["mode", "MiB sent by a host"], rows)


if __name__ == "__main__":
    sys.exit(main())
