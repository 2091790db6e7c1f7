"""Speed and memory of hf_zero on NVIDIA GPUs, beside plain torch and FSDP2.

    python -m benchmarks.gpu                             # raw numbers go to benchmarks/results
    python -m benchmarks.gpu --num_processes 8
    python -m benchmarks.gpu --dry                       # tries the program without a GPU

Needs only torch and transformers. See `benchmarks/README.md` for what each number means.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.launch import attempt, set_environment
from benchmarks.machine import describe_gpu
from benchmarks.modes import split_modes
from benchmarks.report import GIB, Report, markdown, print_failures
from benchmarks.workload import Workload


RESULTS = Path(__file__).with_name("results")
# fp32 masters and state of 8 B parameters fit on no device: everything is in bf16, and blocks are recomputed.
SHAPES = {
    "0.5b": Workload(size="0.5b", dtype="bf16", seq=4096, batch=8),
    "1.5b": Workload(size="1.5b", dtype="bf16", seq=4096, batch=4),
    "8b": Workload(size="llama-8b", dtype="pure-bf16", seq=4096, batch=2, recompute=True),
    "dry": Workload(size="smoke", dtype="bf16", seq=16),
    "dry-pure": Workload(size="smoke", dtype="pure-bf16", seq=16, recompute=True),
}


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    set_environment(int(os.environ.get("OMP_NUM_THREADS", "1")), options.device)
    gpu = describe_gpu(options.device)
    peak = options.peak_tflops or peak_tflops(gpu)
    if options.json is None and not options.dry:
        name = re.sub(r"[^a-z0-9]+", "-", gpu.partition(",")[0].lower()).strip("-")
        options.json = RESULTS / f"{date.today()}-gpu-{name}-{'-'.join(options.shapes)}.json"
    report = Report(options, gpu=gpu)
    print(f"GPU: {gpu}; {'no MFU: give --peak_tflops' if peak is None else f'MFU relative to {peak:g} TFLOPS'}")
    failed = measure_shapes(options, report, peak)
    if options.json:
        print(f"\nraw numbers: {options.json}")
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, to try the program")
    parser.add_argument("--shapes", help="default: 0.5b,1.5b,8b")
    # strict: slots and gathers on one rank, too
    parser.add_argument("--modes", default="plain,fsdp2,hf_zero-3,hf_zero-3@strict=True", help="default: %(default)s")
    parser.add_argument("--num_processes", type=int, default=1, help="devices, each with a process")
    parser.add_argument("--batch", type=int, help="sequences per step (default: depends on the shape)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per mode (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them (default: %(default)s)")
    parser.add_argument("--peak_tflops", type=float, help="for the MFU of an unknown device")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process group")
    parser.add_argument("--json", type=Path, help="default: a file in benchmarks/results; none for --dry")
    options = parser.parse_args(argv)
    options.device = "cpu" if options.dry else "cuda"
    if options.dry:
        options.steps = options.warmup = 1
    options.shapes = (options.shapes or ("dry,dry-pure" if options.dry else "0.5b,1.5b,8b")).split(",")
    if unknown := [name for name in options.shapes if name not in SHAPES]:
        parser.error(f"--shapes: {unknown[0]!r} is not one of {', '.join(SHAPES)}")
    options.modes = split_modes(parser, options.modes)
    return options


def peak_tflops(gpu: str) -> float | None:
    """Dense bf16 TFLOPS of a device that `describe_gpu` describes."""
    from hf_zero.recipes.report import peak_flops  # slow to import; measuring processes do not need it

    found = peak_flops(gpu.partition(",")[0])
    return found and found / 1e12


def measure_shapes(options: argparse.Namespace, report: Report, peak: float | None) -> bool:
    """Times all modes at each shape; returns whether one failed."""
    shapes = report.results["shapes"] = {}
    for name in options.shapes:
        workload = SHAPES[name] if options.batch is None else replace(SHAPES[name], batch=options.batch)
        modes = {mode: _measure(mode, workload, options, peak) for mode in options.modes}
        shapes[name] = {"workload": workload.to_dict(), "num_processes": options.num_processes, "modes": modes}
        _print_shape(name, workload, options, modes)
        report.write()
    return any(mode["error"] for shape in shapes.values() for mode in shape["modes"].values())


def _measure(mode: str, workload: Workload, options: argparse.Namespace, peak: float | None) -> dict:
    spec = {"mode": mode, "workload": workload.to_dict(), "steps": options.steps, "warmup": options.warmup}
    group = {"num_processes": options.num_processes, "timeout": options.timeout, "device": options.device}
    entry: dict = {"error": None}
    ranks = attempt(entry, mode, "benchmarks.gpu_worker:time_mode", spec, **group)
    if ranks is None:
        return entry
    step = max(median(rank["step_seconds"]) for rank in ranks)  # the slowest rank determines the step
    tflops = workload.shape.flops_per_token(workload.seq) * workload.tokens_per_step / step / 1e12
    peaks = [rank["memory"].get("peak_allocated_nbytes") for rank in ranks]
    return entry | {
        "step_seconds": step,
        "tokens_per_second": workload.tokens_per_step * len(ranks) / step,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "peak_nbytes": max(peaks) if all(peaks) else None,
        "last_loss": ranks[0]["losses"][-1],
        "ranks": ranks,
    }


def _print_shape(name: str, workload: Workload, options: argparse.Namespace, modes: dict[str, dict]) -> None:
    recomputed = ", recomputation" if workload.recompute else ""
    print(
        f"\n## {name}: {workload.shape.num_parameters / 1e9:.2f} B, {workload.dtype}, "
        f"{workload.batch} x {workload.seq} tokens on each of {options.num_processes} device(s){recomputed}\n"
    )
    rows = []
    for mode, entry in modes.items():
        label = f"{mode} (no communication)" if mode == "plain" and options.num_processes > 1 else mode
        if entry["error"]:
            rows.append([label, *["-"] * 6, "failed"])
            continue
        rows.append([
            label,
            f"{entry['step_seconds'] * 1e3:.1f}",
            f"{max(rank['host_seconds'] for rank in entry['ranks']) * 1e3:.1f}",
            str(entry["ranks"][0]["launches"]),
            f"{entry['tokens_per_second']:.0f}",
            "-" if entry["mfu"] is None else f"{entry['mfu']:.1%}",
            "-" if entry["peak_nbytes"] is None else f"{entry['peak_nbytes'] / GIB:.2f}",
            f"{entry['last_loss']:.4f}",
        ])  # fmt: skip
    print(markdown(["mode", "step ms", "host ms", "launches", "tokens/s", "MFU", "peak GiB", "last loss"], rows))
    print_failures(modes)


if __name__ == "__main__":
    sys.exit(main())
