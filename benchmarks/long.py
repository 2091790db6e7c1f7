"""Finds how long sequences may be: peak tensor bytes and step time by length, mode by mode.

    python -m benchmarks.long --json out.json
    python -m benchmarks.long --times --timed 512 --modes ddp,fsdp2,hf_zero-3,hf_zero-3@chunked_loss=auto

See `benchmarks/README.md` for what each figure means and how it is taken.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from benchmarks.compare import make_parser, parse, time_rounds
from benchmarks.launch import attempt, set_environment
from benchmarks.report import MIB, Report, markdown, print_failures, round_median
from benchmarks.workload import SIZES, Workload


DEFAULT_SIZES = "small-128k,small"
WARMUP_TOKENS = 64  # of the steps before those that are counted
SKIPPED_NUMEL = 2**16  # elements of tensors that are not computed while bytes are counted
DEFAULT_LENGTHS = "512,2048,4096,8192,16384"
_CHUNKED = "hf_zero-3@chunked_loss=auto"
_TILED = f"{_CHUNKED}@tiled_mlp=auto"
_OFFLOADED = f"{_TILED}@offload_activations=True"
# The last ones are a ladder: each flag added to those before it.
DEFAULT_MODES = (
    "ddp",
    "fsdp2",
    "fsdp2+checkpointing",
    "deepspeed-3",
    "deepspeed-tiled-3+checkpointing",
    "deepspeed-ulysses-3+checkpointing",
    "hf_zero-3",
    f"{_CHUNKED}@offload_activations=True",
    f"{_CHUNKED}@sequence_parallel=2",
    _CHUNKED,
    _TILED,
    f"{_CHUNKED}+checkpointing",
    f"{_TILED}+checkpointing",
    f"{_OFFLOADED}+checkpointing",
    f"{_OFFLOADED}@sequence_parallel=2+checkpointing",
)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    set_environment(options.threads, options.device)
    report, entries = Report(options), []
    for size in options.sizes:
        print(f"\n## {size} ({SIZES[size].num_parameters / 1e6:.1f} M, {SIZES[size].vocab} words), {options.dtype}")
        result = report.results.setdefault(size, {"counted": {}})
        counted, timed = result["counted"], result.setdefault("timed", {})
        for name in [] if options.times else options.modes:
            counted[name] = _count(name, size, options)
            report.write()
        if counted:
            print(f"\n{peaks_table(counted, options.lengths)}\n\n{longest_table(counted, options)}")
        for length in options.timed if options.times else ():
            workload = Workload(size=size, dtype=options.dtype, seq=length, seed=options.seed)
            timed[length] = {name: {"rounds": [], "error": None} for name in options.modes}
            time_rounds(timed[length], workload, options)
            print(f"\n{length} tokens:\n\n{time_table(timed[length], options.compare[0])}", flush=True)
            report.write()
        for entries_of_size in (counted, *timed.values()):
            print_failures(entries_of_size)
            entries += entries_of_size.values()
    return int(any(entry["error"] for entry in entries))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("long", __doc__, modes=",".join(DEFAULT_MODES), references="fsdp2")
    parser.set_defaults(rounds=2, steps=1, warmup=1, timeout=1800)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="default: %(default)s")
    parser.add_argument("--lengths", default=DEFAULT_LENGTHS, help="tokens whose bytes are counted (%(default)s)")
    parser.add_argument("--most_tokens", type=int, default=16384, help="longer ones are not tried (%(default)s)")
    parser.add_argument("--most_mib", type=int, default=4096, help="nor those with which a rank has more resident")
    parser.add_argument("--budget_mib", type=int, default=2048, help="in which the longest sequence is sought")
    parser.add_argument("--times", action="store_true", help="times steps and counts no bytes")
    parser.add_argument("--timed", default="512", help="tokens of the steps that --times takes (%(default)s)")
    parser.add_argument("--computed", action="store_true", help="counts while all is computed, which takes long")
    options = parse(parser, argv)
    options.sizes = options.sizes.split(",") if not options.smoke else ["smoke"]
    if options.smoke:
        options.lengths, options.timed, options.budget_mib = "64,128", "32", 3
    for name in ("lengths", "timed"):
        setattr(options, name, sorted({int(length) for length in getattr(options, name).split(",")}))
    if unknown := [size for size in options.sizes if size not in SIZES]:
        parser.error(f"--sizes {unknown[0]}: the sizes are {', '.join(SIZES)}")
    if options.dtype == "both":
        parser.error("--dtype both: one at a time")
    return options


def _count(name: str, size: str, options: argparse.Namespace) -> dict:
    """What `long_worker.count_lengths` returns, or the error."""
    workload, entry = Workload(size=size, dtype=options.dtype, seq=WARMUP_TOKENS, seed=options.seed), {"error": None}
    spec = {"mode": name, "workload": workload.to_dict(), "lengths": options.lengths, "threads": options.threads}
    spec |= {"skips": 0 if options.computed else SKIPPED_NUMEL, "warmup": max(2, options.warmup)}
    spec |= {"budget_nbytes": options.budget_mib * MIB}
    spec |= {"most_nbytes": options.most_mib * MIB, "most_tokens": options.most_tokens}
    group = {"num_processes": options.num_processes, "timeout": options.timeout}
    ranks = attempt(entry, f"{size} {name} longest", "benchmarks.long_worker:count_lengths", spec, **group)
    return entry if ranks is None else ranks[0] | entry


def peaks_table(counted: dict[str, dict], lengths: list[int]) -> str:
    """MiB of the rank that has most, by length."""
    header = ["peak MiB at", *(str(length) for length in lengths)]
    rows = []
    for name, entry in counted.items():
        peaks = entry.get("peaks", {})
        rows.append([name, *(f"{peaks[length] / MIB:.0f}" if length in peaks else "-" for length in lengths)])
    return markdown(header, rows)


def longest_table(counted: dict[str, dict], options: argparse.Namespace) -> str:
    """The longest sequence within the budget; below it what a rank holds at rest, at the first length."""
    reference = counted.get(options.compare[0], {}).get("longest")
    header = [f"within {options.budget_mib} MiB", "longest", f"/ {options.compare[0]}", "rest MiB"]
    rows = []
    for name, entry in counted.items():
        if entry["error"]:
            rows.append([name, "failed", "-", "-"])
            continue
        more = "" if entry["is_bounded"] else ">= "
        ratio = f"{more}{entry['longest'] / reference:.1f}" if reference else "-"
        rest = entry["rests"][options.lengths[0]] / MIB if entry["rests"] else 0
        rows.append([name, f"{more}{entry['longest']}", ratio, f"{rest:.0f}"])
    return markdown(header, rows)


def time_table(raw: dict[str, dict], reference: str) -> str:
    """Medians over rounds of the slowest rank's median step, and of the ratios within each round."""
    present = {name: entry["rounds"] for name, entry in raw.items() if not entry["error"]}
    seconds = {name: [round_median(ranks, "step_seconds") for ranks in rounds] for name, rounds in present.items()}
    rows = []
    for name, rounds in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(rounds, seconds.get(reference, ()))]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
        rows.append([name, f"{median(rounds) * 1e3:.0f}", spread])
    return markdown(["mode", "step ms", f"/ {reference}"], rows)


if __name__ == "__main__":
    sys.exit(main())
