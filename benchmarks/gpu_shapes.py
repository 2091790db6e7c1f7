"""Tokens per second, MFU and peak memory of whole training steps, at the shapes of Llamas of 0.5 B, 1.5 B and 8 B.

A part of `benchmarks.gpu`. Sequences have 4096 tokens; each mode runs in fresh processes, in the same run as plain
torch and FSDP2, which the numbers are compared with.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from statistics import median

from benchmarks.launch import BACKENDS, run_group
from benchmarks.report import markdown
from benchmarks.workload import Workload
from tests.distributed import RemoteError


GIB = 2**30
MODES = ("plain", "fsdp2", "hf_zero-3", "hf_zero-3@strict=True")  # strict: slots and gathers on one rank, too
ALONE = ("plain", "plain-bf16")  # of several processes each trains a model of its own
# Of 8 B parameters fp32 masters and state do not fit one device: all of it is in bf16, and blocks are recomputed.
SHAPES = {
    "0.5b": Workload(size="0.5b", dtype="bf16", seq=4096, batch=8),
    "1.5b": Workload(size="1.5b", dtype="bf16", seq=4096, batch=4),
    "8b": Workload(size="llama-8b", dtype="pure-bf16", seq=4096, batch=2, recompute=True),
    # For a CPU: says nothing about speed.
    "dry": Workload(size="smoke", dtype="bf16", seq=16),
    "dry-pure": Workload(size="smoke", dtype="pure-bf16", seq=16, recompute=True),
}


def measure_shape(name: str, options: argparse.Namespace, peak_tflops: float | None) -> dict:
    """Times all modes at one shape, on as many devices as there are processes.

    Args:
        options: of `benchmarks.gpu`: `device`, `shape_modes`, `num_processes`, `batch`, `steps`, `warmup` and
            `timeout`.
        peak_tflops: of one device, for MFU.

    Returns:
        The workload, and by mode `tokens_per_second` of all devices, `mfu` of one, `peak_nbytes` of the device that
        has most, `step_seconds`, `last_loss` and the raw numbers of each rank; or the `error`.
    """
    workload = SHAPES[name] if options.batch is None else replace(SHAPES[name], batch=options.batch)
    modes = {mode: _measured(mode, workload, options, peak_tflops) for mode in options.shape_modes}
    _print_shape(name, workload, options, modes)
    return {"workload": workload.to_dict(), "num_processes": options.num_processes, "modes": modes}


def _measured(mode: str, workload: Workload, options: argparse.Namespace, peak_tflops: float | None) -> dict:
    spec = {"mode": mode, "workload": workload.to_dict(), "device": options.device}
    spec |= {"steps": options.steps, "warmup": options.warmup}
    try:
        ranks = run_group(
            "benchmarks.gpu_worker:time_mode",
            spec,
            num_processes=options.num_processes,
            timeout=options.timeout,
            backend=BACKENDS[options.device],
            start="spawn" if options.device == "cuda" else "forkserver",
        )
    except RemoteError as error:
        print(f"{mode}: {error}", file=sys.stderr)
        return {"error": str(error)}
    step = max(median(rank["step_seconds"]) for rank in ranks)  # as slow as the slowest
    tflops = workload.shape.flops_per_token(workload.seq) * workload.tokens_per_step / step / 1e12
    peaks = [rank["memory"].get("peak_allocated_nbytes") for rank in ranks]
    return {
        "error": None,
        "step_seconds": step,
        "tokens_per_second": workload.tokens_per_step * len(ranks) / step,
        "tflops": tflops,
        "mfu": tflops / peak_tflops if peak_tflops else None,
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
        label = f"{mode} (no communication)" if mode in ALONE and options.num_processes > 1 else mode
        if entry["error"]:
            rows.append([label, *["-"] * 6, "failed"])
            continue
        peak, mfu = entry["peak_nbytes"], entry["mfu"]
        rows.append([
            label,
            f"{entry['step_seconds'] * 1e3:.1f}",
            f"{max(rank['host_seconds'] for rank in entry['ranks']) * 1e3:.1f}",
            str(entry["ranks"][0]["launches"]),
            f"{entry['tokens_per_second']:.0f}",
            "-" if mfu is None else f"{mfu:.1%}",
            "-" if peak is None else f"{peak / GIB:.2f}",
            f"{entry['last_loss']:.4f}",
        ])  # fmt: skip
    print(markdown(["mode", "step ms", "host ms", "launches", "tokens/s", "MFU", "peak GiB", "last loss"], rows))
    for mode, entry in modes.items():
        if entry["error"]:
            print(f"\n{mode} failed: {entry['error'].strip().splitlines()[-1]}")


def largest_options(options: argparse.Namespace) -> list[str]:
    """The command line of `benchmarks.gpu --offload` for the largest model, at the same sequence length."""
    shared = ["--device", options.device, "--parts", "largest", "--modes", "device,offload,fsdp2-offload"]
    if options.dry:
        small = "--size smoke --seq 8 --batch 1 --device_gib 0.0022 --host_gib 2 --trials 1 --modes device,offload"
        return [*shared, *small.split(), "--threads", os.environ.get("OMP_NUM_THREADS", "1")]
    return [*shared, "--seq", "4096", "--batch", "4", "--seconds", str(options.largest_seconds)]
