"""The largest model that one device trains, with and without offload; a part of `benchmarks.gpu`.

Blocks have the shape of Llama 3 8B. Each trial is its own process, so running out of memory ends only that trial.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.launch import attempt, run_group
from benchmarks.machine import available_nbytes
from benchmarks.report import GIB, markdown
from benchmarks.workload import Workload


# By name: the mode, and how much of masters, gradients and state it offloads: nothing, what does not fit on the
# device, or everything including the parameters.
CONTENDERS = {
    "device": ("hf_zero-2", "nothing"),
    "offload": ("hf_zero-2@offload=optimizer", "part"),
    "fsdp2-offload": ("fsdp2-offload", "all"),
}
MOST_LAYERS = 1024
STATE_NBYTES = 16  # per parameter: fp32 master, gradient and two moments of Adam, on either side
COPY_NBYTES = 2  # the bf16 copy that computes
COLLECTED_NBYTES = 2  # the bf16 gradients, where all of them exist at once
STAGING_NBYTES = 3 * 2**29  # page-locked buffers and libraries
HOST_SHARE, DEVICE_SHARE = 0.94, 0.9  # usable share of what is free: allocators waste some
FLOOR_NBYTES = 4 * GIB  # main memory that stays free


@dataclass(frozen=True)
class Search:
    """What is tried, and within what.

    Args:
        workload: the training job; trials differ in `layers`.
        device: "cuda" or "cpu".
        device_nbytes: memory of the device that may be used, or None for all that is free.
        host_nbytes: main memory that may be used, or None for all that is free except `FLOOR_NBYTES`.
        names: of `CONTENDERS`.
        num_trials: per mode.
        grain: layers to which the largest model is found.
        deadline: no trial starts later (`time.monotonic()`).
        timeout: seconds of one trial.
        threads: of a trial's process.
    """

    workload: Workload
    device: str
    deadline: float
    timeout: float
    device_nbytes: int | None = None
    host_nbytes: int | None = None
    names: tuple[str, ...] = tuple(CONTENDERS)
    num_trials: int = 2
    grain: int = 2
    threads: int = len(os.sched_getaffinity(0))

    @classmethod
    def of(cls, options: argparse.Namespace) -> Search:
        """From the options of `benchmarks.gpu`."""
        limits = {"deadline": time.monotonic() + options.seconds, "timeout": options.timeout}
        if options.dry:
            tiny = Workload(size="smoke", dtype="bf16", seq=8, batch=1, recompute=True)
            room = {"device_nbytes": int(0.0022 * GIB), "host_nbytes": 2 * GIB}
            return cls(tiny, "cpu", **limits, **room, names=("device", "offload"), num_trials=1, threads=1)
        return cls(Workload(size="8b", dtype="bf16", seq=4096, batch=4, recompute=True), "cuda", **limits)

    def with_room(self) -> Search:
        """Fills in what is free."""
        free = available_nbytes() - FLOOR_NBYTES
        host = free if self.host_nbytes is None else min(free, self.host_nbytes)
        # in a process of its own, which takes what a trial's process takes before it begins
        device = self.device_nbytes or run_group("benchmarks.gpu_worker:free_on_device", {}, **self.group)[0]
        return replace(self, host_nbytes=host, device_nbytes=device)

    @property
    def group(self) -> dict:
        return {"num_processes": 1, "timeout": self.timeout, "device": self.device}


def find_largest(search: Search) -> dict[str, dict]:
    """Finds the largest model of each mode: its `layers`, `predicted_layers`, the `trials`, and the `best` of them."""
    os.environ["OMP_NUM_THREADS"] = str(search.threads)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = {}
    limited = search.with_room()
    for name in search.names:
        trials: list[dict] = []

        def works(layers: int, name: str = name, trials: list[dict] = trials) -> bool | None:
            done = sum(trial["refusal"] is None for trial in trials)
            if done >= search.num_trials or time.monotonic() > search.deadline:
                return None
            trials.append(try_layers(name, layers, limited))
            return trials[-1]["error"] is None

        def is_too_large(layers: int, name: str = name) -> bool:
            plan = planned(name, layers, limited)
            return plan["refusal"] is not None or plan["device_nbytes"] > 0.95 * limited.device_nbytes

        first = bisect_left(range(1, MOST_LAYERS + 1), True, key=is_too_large)
        layers = largest_that_works(works, first, grain=search.grain)
        best = next((trial for trial in trials if trial["layers"] == layers and trial["error"] is None), None)
        found[name] = {"layers": layers, "predicted_layers": first, "trials": trials, "best": best}
    _print_largest(found, search)
    return found


def largest_that_works(works: Callable[[int], bool | None], first: int, *, grain: int) -> int:
    """The largest number of layers with which a trial works (0 for none), to within the grain: grows from the first
    while trials work, then bisects. `works` returns None if no further trial may start."""
    low, high, layers = 0, None, max(1, first)
    while high is None or high - low > grain:
        worked = works(layers)
        if worked is None:
            break
        low, high = (layers, high) if worked else (low, layers)
        layers = max(low + grain, low * 5 // 4) if high is None else (low + high) // 2
        if layers == low:
            break
    return low


def planned(name: str, layers: int, search: Search) -> dict:
    """Roughly what a trial takes: the `fraction` of the model that is offloaded, bytes of the device and of the host,
    and why it is not tried (`refusal`, or None)."""
    (_, kind), job = CONTENDERS[name], replace(search.workload, layers=layers)
    shape, tokens = job.shape, job.tokens_per_step
    num = shape.num_parameters
    # inputs of recomputed blocks, the inside of one block, logits and their gradients
    inside = tokens * (24 * shape.hidden + 10 * shape.intermediate)
    active = 2 * tokens * shape.hidden * layers + inside + 18 * tokens * shape.vocab
    # buffers for the gradients or parameters of two blocks and the root
    active += 0 if kind == "nothing" else 4 * (2 * shape.num_block_parameters + shape.vocab * shape.hidden)
    fraction = 0.0 if kind == "nothing" else 1.0
    if kind == "part":
        left = search.device_nbytes * DEVICE_SHARE - active - COPY_NBYTES * num
        # blocks are offloaded whole: one more than enough
        fraction = min(1.0, max(0.0, 1 - left / (STATE_NBYTES * num)) + 1 / layers)
    copies = {"nothing": COPY_NBYTES + COLLECTED_NBYTES, "part": COPY_NBYTES, "all": 0}[kind]
    on_device = int(copies * num + STATE_NBYTES * num * (1 - fraction) + active)
    on_host = int(STATE_NBYTES * num * fraction) + (STAGING_NBYTES if fraction else 0)
    allowed, refusal = HOST_SHARE * search.host_nbytes, None
    if on_host > allowed:
        refusal = f"needs {on_host / GIB:.2f} GiB of main memory, and {allowed / GIB:.2f} GiB may be used"
    return {"fraction": fraction, "device_nbytes": on_device, "host_nbytes": on_host, "refusal": refusal}


def try_layers(name: str, layers: int, search: Search) -> dict:
    """One trial: refused, failed (`error` says why), or measured."""
    workload, plan = replace(search.workload, layers=layers), planned(name, layers, search)
    num, fraction, refusal = workload.shape.num_parameters, plan["fraction"], plan["refusal"]
    trial = {"layers": layers, "num_parameters": num, "fraction": fraction, "refusal": refusal, "error": refusal}
    label = f"{name}, {layers} layers, {num / 1e9:.2f} B, offloaded {fraction:.2f}"
    if refusal:
        print(f"  {label}: {refusal}", file=sys.stderr)
        return trial
    mode, kind = CONTENDERS[name]
    if kind == "part":
        mode += f"@offload_fraction={fraction:.6f}"
    spec = {"mode": mode, "workload": workload.to_dict(), "warmup": 1, "wire_steps": 1, "threads": search.threads}
    spec |= {"budget": search.device_nbytes}
    ranks = attempt(trial, label, "benchmarks.gpu_worker:try_model", spec, **search.group)
    return trial | {"result": ranks and ranks[0]}


def _print_largest(found: dict, search: Search) -> None:
    print(f"\n## The largest model that trains ({search.workload.size} blocks, bf16, fp32 masters, recomputation)\n")
    rows = []
    for name, entry in found.items():
        best = entry["best"]
        if best is None:
            rows.append([name, "0", "-", "-", "-", "-", "-"])
            continue
        result = best["result"]
        rows.append([
            name,
            str(entry["layers"]),
            f"{best['num_parameters'] / 1e9:.3f}",
            f"{best['fraction']:.2f}",
            f"{result['device_peak_nbytes'] / GIB:.2f}",
            f"{result['host_nbytes'] / GIB:.2f}",
            f"{search.workload.tokens_per_step / median(result['step_seconds']):.0f}",
        ])  # fmt: skip
    print(markdown(["mode", "layers", "B", "offloaded", "device GiB", "host GiB", "tokens/s"], rows))
