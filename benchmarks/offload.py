"""Compares what offload to the host costs and saves: hf_zero, DeepSpeed ZeRO-Offload and FSDP2 in one run.

    python -m benchmarks.offload --json out.json

See `benchmarks/README.md` for what each number means; `host_nbytes` in `benchmarks/modes.py` decides which bytes
are the host's.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial

from benchmarks.compare import compare, make_parser, parse, workloads
from benchmarks.launch import set_environment
from benchmarks.modes import parse_mode
from benchmarks.report import BUS_WAYS, Report, markdown, mib
from benchmarks.workload import SIZES


_OPTIMIZER = "hf_zero-2@offload=optimizer"
MODES = (
    "hf_zero-2",
    _OPTIMIZER,
    "hf_zero-2@in_backward=True",  # not offloaded; only clipping is disabled
    f"{_OPTIMIZER}@in_backward=True",
    "hf_zero-3@offload=params",
    "fsdp2",
    "fsdp2-offload",
    "deepspeed-offload-2",
    "deepspeed-offload-3",
)
REFERENCES = ("fsdp2-offload", "deepspeed-offload-2", "deepspeed-offload-3", "hf_zero-2")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("offload", __doc__, modes=",".join(MODES), references=",".join(REFERENCES))
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks, one after the other (default: %(default)s)")
    parser.set_defaults(dtype="both", seq=128, rounds=3, steps=3, threads=0)
    options = parse(parser, argv)
    report, done = Report(options), True
    for num_ranks in map(int, options.worlds.split(",")):
        # ranks share the cores, unless --threads is given
        threads = options.threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)
        own = Namespace(**(vars(options) | {"num_processes": num_ranks, "threads": threads}))
        set_environment(own.threads, own.device)
        places = partial(places_table, SIZES[own.size].num_parameters)
        for workload in workloads(own):
            key = f"{workload.dtype}, {num_ranks} ranks"
            done &= compare(report, key, workload, own, losses_of=losses_of, own_table=places)
    return 0 if done else 1


def losses_of(name: str) -> str:
    """A mode's losses are compared with hf_zero without offload; without clipping if the mode does not clip."""
    return "hf_zero-2@in_backward=True" if parse_mode(name).options.get("in_backward") else "hf_zero-2"


def places_table(num_parameters: int, raw: dict, summaries: dict[str, dict]) -> str:
    """Memory of the rank that has most. Host: tensors that offload puts into main memory. Device: the peak of all
    others. Down, up: bytes over the bus per parameter and step, of all ranks."""
    rows = []
    for name, summary in summaries.items():
        device, host, bus = summary["device_peak_nbytes"], summary["host_nbytes"], summary["bus_nbytes"]
        moved = [f"{bus[way] / num_parameters:.2f}" if bus else "-" for way in reversed(BUS_WAYS)]
        peak = ["-", "-"] if device is None else [mib(device), f"{device / num_parameters:.2f}"]
        rows.append([name, *peak, mib(host), f"{host / num_parameters:.2f}", *moved])
    header = ["mode", "device MiB", "bytes per parameter", "host MiB", "bytes per parameter", "down", "up"]
    return markdown(header, rows)


if __name__ == "__main__":
    sys.exit(main())
