"""Compares training modes side by side in one run.

    python -m benchmarks.compare --modes hf_zero-3,ddp,fsdp2 --size small --json out.json

See `benchmarks/README.md` for what each figure means and how it is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launch import BACKENDS, LEFT_BY_PEERS, remove_shared_memory, run_group, shared_memory_files
from benchmarks.machine import describe_machine, one_line
from benchmarks.names import ALL_MODES, missing_package, parse_mode
from benchmarks.report import bytes_table, ratios_table, summarize, time_table
from benchmarks.workload import SIZES, Workload
from tests.distributed import RemoteError
from tests.hosts.network import Host


DEFAULT_MODES = "hf_zero-0,hf_zero-1,hf_zero-2,hf_zero-3,ddp,fsdp2"


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    set_environment(options)
    report = {"machine": describe_machine(), "settings": vars(options) | {"json": None}, "results": {}}
    print(one_line(report["machine"]))
    modes = present_modes(options.modes)
    failed = False
    for workload in workloads(options):
        dtype = workload.dtype
        raw = measure(modes, workload, options)
        summary = summarize(raw, options.compare)
        report["results"][dtype] = {"raw": raw, "summary": summary}
        _print_tables(dtype, raw, summary, options)
        failed = failed or any(entry["error"] for entry in raw.values())
        if options.json:
            # After each dtype, so that a run that is broken off keeps what it has.
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def set_environment(options: argparse.Namespace) -> None:
    """Before the server process starts: ranks inherit it."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    add_arguments(parser, modes=DEFAULT_MODES, references="fsdp2,ddp")
    return checked(parser, parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser, *, modes: str, references: str) -> None:
    """What every comparison of modes in one run can be told."""
    parser.epilog = f"Modes: {', '.join(ALL_MODES)}"
    parser.add_argument("--modes", default=modes, help="comma-separated; default: %(default)s")
    parser.add_argument("--compare", default=references, help="modes to give ratios against (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "both"), default="fp32")
    parser.add_argument("--num_processes", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per mode and round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one mode in one round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write raw numbers, medians and ratios here")
    parser.add_argument("--smoke", action="store_true", help="a model of 0.1 M, one round of two steps: does it run?")


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    options.modes = _names(parser, options.modes)
    options.compare = _names(parser, options.compare)
    if options.smoke:
        options.size, options.seq, options.rounds, options.steps, options.warmup = "smoke", 32, 1, 2, 1
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def _names(parser: argparse.ArgumentParser, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            parse_mode(name)
        except ValueError as error:
            parser.error(str(error))
    return list(dict.fromkeys(names))


def workloads(options: argparse.Namespace) -> list[Workload]:
    """One of each dtype that is asked for."""
    shape = {name: getattr(options, name) for name in ("size", "seq", "batch", "accumulate", "seed")}
    return [Workload(dtype=dtype, **shape) for dtype in ("fp32", "bf16") if options.dtype in (dtype, "both")]


def present_modes(names: list[str]) -> list[str]:
    """The modes whose package is installed; says which are left out."""
    present = []
    for name in names:
        package = missing_package(name)
        if package is None:
            present.append(name)
        else:
            print(f"{name}: left out, the package {package!r} is not installed (extra: bench)", file=sys.stderr)
    return present


def measure(
    modes: list[str], workload: Workload, options: argparse.Namespace, hosts: Sequence[Host] = ()
) -> dict[str, dict]:
    """Counts each mode's bytes once, then times all modes round by round, each time in fresh processes; these are on
    this machine, or on `hosts`."""
    raw = {name: {"bytes": None, "rounds": [], "error": None} for name in modes}
    for name in modes:
        attempt(raw, name, "count_bytes", workload, options, hosts)
    for number in range(options.rounds):
        for name in rotated(modes, number):
            attempt(raw, name, "time_steps", workload, options, hosts)
    return raw


def rotated(modes: list[str], number: int) -> list[str]:
    """Each round starts with another mode, every second one runs backwards: no mode always follows the same one."""
    shift = number % max(len(modes), 1)
    order = modes[shift:] + modes[:shift]
    return order[::-1] if number % 2 else order


def attempt(
    raw: dict, name: str, task: str, workload: Workload, options: argparse.Namespace, hosts: Sequence[Host]
) -> None:
    """Runs one task of one mode; a mode that fails is left out from then on, the others go on."""
    entry = raw[name]
    if entry["error"]:
        return
    spec = {"mode": name, "workload": workload.to_dict(), "wire_steps": 2}
    spec |= {"steps": options.steps, "warmup": options.warmup, "device": options.device, "threads": options.threads}
    before, start = shared_memory_files(), time.monotonic()
    try:
        ranks = run_group(
            f"benchmarks.worker:{task}",
            spec,
            num_processes=options.num_processes,
            timeout=options.timeout,
            backend=BACKENDS[options.device],
            start="spawn" if options.device == "cuda" else "forkserver",
            hosts=hosts,
        )
    except RemoteError as error:
        entry["error"] = str(error)
        print(f"{name} {workload.dtype}: {error}", file=sys.stderr)
        return
    finally:
        left = remove_shared_memory(before, LEFT_BY_PEERS)
    if left:
        entry.setdefault("left_in_shared_memory", []).extend(left)
        print(f"{name}: new in /dev/shm after the run: {', '.join(left)}", file=sys.stderr)
    if task == "count_bytes":
        entry["bytes"] = ranks
    else:
        entry["rounds"].append(ranks)
    print(f"  {workload.dtype} {name} {task}: {time.monotonic() - start:.1f} s in all", file=sys.stderr)


def _print_tables(dtype: str, raw: dict, summary: dict, options: argparse.Namespace) -> None:
    millions = SIZES[options.size].num_parameters / 1e6
    print(
        f"\n## {dtype}: {options.size} ({millions:.1f} M), {options.num_processes} ranks, "
        f"{options.accumulate} x {options.batch} x {options.seq} tokens per rank and step, "
        f"{options.rounds} rounds of {options.steps} steps\n"
    )
    print(f"{time_table(summary)}\n\n{bytes_table(summary)}")
    for reference in options.compare:
        if reference in summary:
            print(f"\n{ratios_table(summary, reference)}")
    for name, entry in raw.items():
        if entry["error"]:
            print(f"\n{name} failed: {entry['error'].strip().splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
