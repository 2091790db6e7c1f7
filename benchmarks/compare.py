"""Compares training modes side by side in one run.

    python -m benchmarks.compare --modes hf_zero-3,ddp,fsdp2 --size small --json out.json

See `benchmarks/README.md` for what each number means and how it is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.launch import attempt, set_environment
from benchmarks.modes import ALL_MODES, split_modes
from benchmarks.report import Report, bytes_table, print_failures, ratios_table, summarize, time_table
from benchmarks.workload import SIZES, Workload
from tests.hosts.network import Host


DEFAULT_MODES = "hf_zero-0,hf_zero-1,hf_zero-2,hf_zero-3,ddp,fsdp2"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("compare", __doc__, modes=DEFAULT_MODES, references="fsdp2,ddp")
    options = parse(parser, argv)
    set_environment(options.threads, options.device)
    report = Report(options)
    done = [compare(report, workload.dtype, workload, options) for workload in workloads(options)]
    return 0 if all(done) else 1


def make_parser(program: str, doc: str, *, modes: str, references: str) -> argparse.ArgumentParser:
    """The options of all programs that compare modes in rounds."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=doc.splitlines()[0])
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
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(argv)
    options.modes, options.compare = (split_modes(parser, text) for text in (options.modes, options.compare))
    if options.smoke:
        options.size, options.seq, options.rounds, options.steps, options.warmup = "smoke", 32, 1, 2, 1
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def workloads(options: argparse.Namespace) -> list[Workload]:
    """One for each dtype."""
    shape = {name: getattr(options, name) for name in ("size", "seq", "batch", "accumulate", "seed")}
    return [Workload(dtype=dtype, **shape) for dtype in ("fp32", "bf16") if options.dtype in (dtype, "both")]


def compare(
    report: Report,
    key: str,
    workload: Workload,
    options: argparse.Namespace,
    *,
    hosts: Sequence[Host] = (),
    losses_of: Callable[[str], str] = lambda name: "ddp",
    own_table: Callable[[dict, dict], str] | None = None,
) -> bool:
    """Measures all modes, prints the tables, and adds the numbers to the report; returns whether no mode failed.

    Args:
        report: gets raw numbers and their summary as `results[key]`.
        key: also the title of the tables.
        workload: the training job.
        options: of `make_parser`.
        hosts: where ranks run, if not on this machine.
        losses_of: the mode whose losses a mode's losses are compared with.
        own_table: makes a table that this program adds, from raw numbers and summary.
    """
    raw = {name: {"bytes": None, "rounds": [], "error": None} for name in options.modes}
    for name, entry in raw.items():
        entry["bytes"] = run_mode(entry, name, "count_bytes", workload, options, hosts)
    time_rounds(raw, workload, options, hosts)
    summary = summarize(raw, options.compare, losses_of)
    print(
        f"\n## {key}: {workload.size} ({workload.shape.num_parameters / 1e6:.1f} M), {options.num_processes} ranks of "
        f"{options.threads} threads, {workload.accumulate} x {workload.batch} x {workload.seq} tokens per rank and "
        f"step, {options.rounds} rounds of {options.steps} steps\n"
    )
    tables = [time_table(summary), bytes_table(summary), *([own_table(raw, summary)] if own_table else [])]
    tables += [ratios_table(summary, reference) for reference in options.compare if reference in summary]
    print("\n\n".join(tables))
    print_failures(raw)
    report.results[key] = {"raw": raw, "summary": summary}
    report.write()
    return not any(entry["error"] for entry in raw.values())


def time_rounds(raw: dict, workload: Workload, options: argparse.Namespace, hosts: Sequence[Host] = ()) -> None:
    """Times all modes round by round, each time in fresh processes."""
    for number in range(options.rounds):
        for name in rotated(list(raw), number):
            ranks = run_mode(raw[name], name, "time_steps", workload, options, hosts)
            if ranks is not None:
                raw[name]["rounds"].append(ranks)


def rotated(modes: list[str], number: int) -> list[str]:
    """Each round starts with another mode, every second one runs backwards: no mode always follows the same one."""
    shift = number % max(len(modes), 1)
    order = modes[shift:] + modes[:shift]
    return order[::-1] if number % 2 else order


def run_mode(
    entry: dict, name: str, task: str, workload: Workload, options: argparse.Namespace, hosts: Sequence[Host] = ()
) -> list | None:
    """One task of `benchmarks.worker` on all ranks of one mode."""
    spec = {"mode": name, "workload": workload.to_dict(), "wire_steps": 2}
    spec |= {"steps": options.steps, "warmup": options.warmup, "threads": options.threads}
    group = {"num_processes": options.num_processes, "timeout": options.timeout, "device": options.device}
    label = f"{workload.dtype} {name} {task}"
    return attempt(entry, label, f"benchmarks.worker:{task}", spec, **group, hosts=hosts)


if __name__ == "__main__":
    sys.exit(main())
