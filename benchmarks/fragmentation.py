"""How much of what the device's allocator reserves is used at the peak, over many steps of varying sequence length.

A part of `benchmarks.gpu`. Activations of ever new sizes leave holes; long-lived tensors between them keep the holes
from being joined, and what is reserved grows beyond what is ever used at once.
"""

from __future__ import annotations

import os
import random
import sys

import torch

from benchmarks.launch import run_group
from benchmarks.modes import build_mode
from benchmarks.report import MIB, markdown
from benchmarks.workload import SIZES, Workload
from tests.distributed import RemoteError


GOAL = 1.03  # reserved / allocated bytes, both at their peaks


def measure(modes: list[str], workload: Workload, *, steps: int, num_ranks: int, group: dict) -> dict[str, dict]:
    """Runs each mode in fresh processes.

    Args:
        modes: names, see `benchmarks.names`.
        workload: whose `seq` is the longest sequence.
        steps: how many, each of another length.
        num_ranks: with two or more they share the device and talk through gloo.
        group: device, timeout, backend and start of `run_group`.
    """
    found = {}
    for name in modes:
        spec = {"mode": name, "workload": workload.to_dict(), "steps": steps, "device": group["device"]}
        settings = {key: value for key, value in group.items() if key != "device"}
        try:
            ranks = run_group("benchmarks.fragmentation:vary_length", spec, num_processes=num_ranks, **settings)
            found[name] = {"ranks": ranks, "error": None}
        except RemoteError as error:
            found[name] = {"ranks": [], "error": str(error)}
            print(f"{name}: {error}", file=sys.stderr)
    return found


def vary_length(spec: dict, rank: int) -> dict:
    """One rank's job: trains, and says what its allocator holds."""
    os.environ["LOCAL_RANK"] = "0"  # all ranks use the first device
    device, workload = spec["device"], Workload(**spec["workload"])
    mode = build_mode(spec["mode"], workload.build_model(device), workload)
    lengths = random.Random(workload.seed)
    for step in range(spec["steps"]):
        length = lengths.randint(max(1, workload.seq // 8), workload.seq)
        batch = {name: tokens[:, :length] for name, tokens in workload.micro_batches(rank, step, device)[0].items()}
        with mode.micro_batch(last=True):
            mode.backward(mode.forward(batch))
        mode.update()
    return {"allocator": _allocator(device)}


def _allocator(device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        "peak_allocated_nbytes": allocated,
        "peak_reserved_nbytes": reserved,
        "ratio": reserved / allocated,
        "device_allocations": stats["num_device_alloc"],
        "retries": stats["num_alloc_retries"],
    }


def print_table(found: dict[str, dict], workload: Workload, *, steps: int, num_ranks: int) -> None:
    size = SIZES[workload.size].num_parameters / 1e6
    print(
        f"\n## Reserved and allocated at the peak: {num_ranks} rank(s), {size:.1f} M, "
        f"{steps} steps of {max(1, workload.seq // 8)} to {workload.seq} tokens, goal {GOAL}\n"
    )
    header = ["mode", "allocated MiB", "reserved MiB", "ratio", "device allocations", "retries"]
    print(markdown(header, [[name, *_cells(entry)] for name, entry in found.items()]))


def _cells(entry: dict) -> list[str]:
    if entry["error"]:
        return ["-", "-", "failed", "-", "-"]
    worst = max(entry["ranks"], key=lambda rank: rank["allocator"].get("ratio", 0))
    stats = worst["allocator"]
    cells = ["-"] * 5
    if stats:
        cells = [f"{stats[key] / MIB:.0f}" for key in ("peak_allocated_nbytes", "peak_reserved_nbytes")]
        cells += [f"{stats['ratio']:.3f}", f"{stats['device_allocations']}", f"{stats['retries']}"]
    return cells
