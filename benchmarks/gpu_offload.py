"""Offload on one NVIDIA GPU: is it exact, how large a model does it train, how fast, and what is hidden behind what.

    python -m benchmarks.gpu --offload --parts exact,rates --json exact.json
    python -m benchmarks.gpu --offload --parts largest --modes device,offload,fsdp2-offload --seconds 480 --json l.json
    python -m benchmarks.gpu --offload --parts speed --layers 32,46 --json speed.json

Needs torch and transformers alone. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.exact import CASES, DELAYS, print_exact
from benchmarks.launch import BACKENDS, run_group
from benchmarks.machine import available_nbytes, describe_gpu, describe_machine, one_line
from benchmarks.report import markdown
from benchmarks.workload import SIZES, Workload
from tests.distributed import RemoteError


# By name: the mode, and what of masters, gradients and state is offloaded: nothing, the part that the device has no
# place for, the whole of them, or all with the parameters.
CONTENDERS = {
    "device": ("hf_zero-2", "device"),
    "offload": ("hf_zero-2@offload=optimizer", "part"),
    "offload-in-backward": ("hf_zero-2@offload=optimizer@in_backward=True", "part"),
    "offload-all": ("hf_zero-2@offload=optimizer", "whole"),
    "fsdp2-offload": ("fsdp2-offload", "all"),
}
PARTS = ("exact", "rates", "largest", "speed")
GIB = 2**30
MOST_LAYERS = 1024
STATE_NBYTES = 16  # per parameter: fp32 master, gradient and two moments of Adam, wherever they are
COPY_NBYTES = 2  # the bf16 copy that computes
COLLECTED_NBYTES = 2  # the bf16 gradients, where all of them exist at once
STAGING_NBYTES = 3 * 2**29  # page-locked buffers, and what the libraries take
HOST_SHARE, DEVICE_SHARE = 0.94, 0.9  # of what is free: of the rest, allocators waste some


def main(argv: list[str] | None = None) -> int:
    options = _prepared(parse_arguments(argv))
    report = {"machine": describe_machine() | {"gpu": describe_gpu(options.device)}, "settings": _settings(options)}
    print(f"{one_line(report['machine'])}; GPU: {report['machine']['gpu']}")
    failed = False
    for part in options.parts:
        report[part], failed_here = _PARTS[part](options, report)
        failed = failed or failed_here
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def _prepared(options: Namespace) -> Namespace:
    """Begins the time that the options give, and sets what the processes of trials read when they start."""
    options.deadline = time.monotonic() + options.seconds
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums each time
    return options


def find_largest(argv: list[str], report: dict) -> tuple[dict, bool]:
    """Finds the largest models for another program; returns them, and whether that failed."""
    return _largest(_prepared(parse_arguments(argv)), report)


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu --offload", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--modes", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="8b", help="shape of the blocks (default: %(default)s)")
    parser.add_argument("--layers", help="speed: numbers of layers, by comma (default: what `largest` found)")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device_gib", type=float, help="how much of the device may be used (default: what is free)")
    parser.add_argument("--host_gib", type=float, help="how much main memory may be used (default: what is free)")
    parser.add_argument("--floor_gib", type=float, default=4, help="main memory that must stay free")
    parser.add_argument("--trials", type=int, default=2, help="of each mode (default: %(default)s)")
    parser.add_argument("--grain", type=int, default=2, help="layers to which the largest is found")
    parser.add_argument("--seeds", type=int, default=2, help="exact: how many (default: %(default)s)")
    parser.add_argument("--ranks_size", choices=SIZES, default="tiny", help="exact: the model (default: %(default)s)")
    parser.add_argument("--cases", default=",".join(CASES), help="exact (default: %(default)s)")
    parser.add_argument("--delays", default=",".join(DELAYS), help="exact: what is slowed down (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new trial is begun after so many seconds")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one trial")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    for name, known in (("parts", PARTS), ("modes", CONTENDERS), ("cases", CASES), ("delays", DELAYS)):
        chosen = [word for word in getattr(options, name).split(",") if word]
        unknown = [word for word in chosen if word not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r} is not one of {', '.join(known)}")
        setattr(options, name, chosen)
    options.layers = [int(number) for number in options.layers.split(",")] if options.layers else None
    return options


def _settings(options: Namespace) -> dict:
    return {name: value for name, value in vars(options).items() if name not in ("json", "deadline")}


def _run(task: str, spec: dict, options: Namespace) -> dict:
    """One task in a fresh process: what goes wrong there, an end by the kernel included, is a `RemoteError` here."""
    return run_group(
        task,
        spec | {"device": options.device, "threads": options.threads},
        num_processes=1,
        timeout=options.timeout,
        backend=BACKENDS[options.device],
        start="spawn" if options.device == "cuda" else "forkserver",
    )[0]


def _exact(options: Namespace, report: dict) -> tuple[dict, bool]:
    workload = Workload(size=options.ranks_size, seq=64, batch=2)
    spec = {"workload": workload.to_dict(), "dtypes": ["fp32", "bf16"], "seeds": options.seeds}
    spec |= {"cases": options.cases, "delays": options.delays}
    patient = Namespace(**(vars(options) | {"timeout": max(options.timeout, 590)}))  # hundreds of short runs
    try:
        checks = _run("benchmarks.exact:check", spec, patient)
    except RemoteError as error:
        print(f"exact: {error}", file=sys.stderr)
        return {"error": str(error)}, True
    print_exact(checks)
    return checks, not all(check["equal"] for check in checks["cases"])


def _rates(options: Namespace, report: dict) -> tuple[dict, bool]:
    small = options.device == "cpu"
    spec = {"numel": 2**18 if small else 2**28, "times": 3}
    rates = _run("benchmarks.gpu_offload_worker:measure_rates", spec, options)
    print(f"\n## What the machine can do ({options.threads} threads)\n")
    rows = [[name.replace("_", " "), f"{rate / 1e9:.2f}"] for name, rate in rates.items()]
    print(markdown(["rate", "in 1e9"], rows))
    return rates, False


def _largest(options: Namespace, report: dict) -> tuple[dict, bool]:
    """The largest model of each mode; every trial is a process of its own, refused where the host would run full."""
    found = {}
    for name in options.modes:
        trials: list[dict] = []

        def works(layers: int, name: str = name, trials: list[dict] = trials) -> bool | None:
            done = sum(trial["refusal"] is None for trial in trials)
            if done >= options.trials or time.monotonic() > options.deadline:
                return None
            trials.append(attempt(name, layers, options, steps=1))
            return trials[-1]["error"] is None

        numbers = range(1, MOST_LAYERS + 1)
        first = bisect_left(numbers, True, key=lambda layers, name=name: _is_too_large(name, layers, options))
        layers = search(works, first, grain=options.grain)
        best = next((trial for trial in trials if trial["layers"] == layers and trial["error"] is None), None)
        found[name] = {"layers": layers, "predicted_layers": first, "trials": trials, "best": best}
    _print_largest(found, options)
    return found, not any(entry["best"] for entry in found.values())


def workload_of(layers: int, options: Namespace) -> Workload:
    return Workload(
        size=options.size, dtype="bf16", seq=options.seq, batch=options.batch, layers=layers, recompute=True
    )


def search(works: Callable[[int], bool | None], first: int, *, grain: int, growth: float = 1.25) -> int:
    """The largest number of layers with which a trial works (0 for none), but for the grain: growing from the first
    as long as it does, then halving the interval. `works` says None when no further trial may be made."""
    low, high, layers = 0, None, max(1, first)
    while high is None or high - low > grain:
        worked = works(layers)
        if worked is None:
            break
        low, high = (layers, high) if worked else (low, layers)
        layers = max(low + grain, int(low * growth)) if high is None else (low + high) // 2
        if layers == low:
            break
    return low


def planned(name: str, layers: int, options: Namespace) -> dict:
    """What a trial in bf16 by one process takes, roughly: the `fraction` of the model that is offloaded, the bytes of
    the device and of the host, and why it is not tried (`refusal`; None where it is)."""
    (_, kind), room, shape = CONTENDERS[name], _room(options), workload_of(layers, options).shape
    num, tokens = shape.num_parameters, options.seq * options.batch
    # inputs of recomputed blocks, one block's inside, logits and their gradients
    inside = tokens * (24 * shape.hidden + 10 * shape.intermediate)
    active = 2 * tokens * shape.hidden * layers + inside + 18 * tokens * shape.vocab
    # buffers in which two blocks and the root have their gradients, or their parameters
    active += 0 if kind == "device" else 4 * (2 * shape.num_block_parameters + shape.vocab * shape.hidden)
    fraction = 0.0 if kind == "device" else 1.0
    if kind == "part":
        left = room["device_nbytes"] * DEVICE_SHARE - active - COPY_NBYTES * num
        # whole blocks are offloaded: one more than enough
        fraction = min(1.0, max(0.0, 1 - left / (STATE_NBYTES * num)) + 1 / layers)
    copies = {"device": COPY_NBYTES + COLLECTED_NBYTES, "all": 0}.get(kind, COPY_NBYTES)
    on_device = int(copies * num + STATE_NBYTES * num * (1 - fraction) + active)
    on_host = int(STATE_NBYTES * num * fraction) + (STAGING_NBYTES if fraction else 0)
    allowed, refusal = HOST_SHARE * room["host_nbytes"], None  # where the host runs full, all on the machine suffers
    if on_host > allowed:
        refusal = f"{on_host / GIB:.2f} GiB of main memory are needed, and {allowed / GIB:.2f} may be taken"
    return {"fraction": fraction, "device_nbytes": on_device, "host_nbytes": on_host, "refusal": refusal}


def _room(options: Namespace) -> dict[str, int]:
    return {"device_nbytes": _device_room(options), "host_nbytes": _host_room(options)}


def _is_too_large(name: str, layers: int, options: Namespace) -> bool:
    plan = planned(name, layers, options)
    return plan["refusal"] is not None or plan["device_nbytes"] > 0.95 * _device_room(options)


def _host_room(options: Namespace) -> int:
    free = available_nbytes() - int(options.floor_gib * GIB)
    return free if options.host_gib is None else min(free, int(options.host_gib * GIB))


def _device_room(options: Namespace) -> int:
    if options.device_gib is not None:
        return int(options.device_gib * GIB)
    if options.device == "cpu":
        return available_nbytes() // 4
    if not hasattr(options, "free_on_device"):
        options.free_on_device = _run("benchmarks.gpu_offload:free_on_device", {}, options)
    return options.free_on_device


def free_on_device(spec: dict, rank: int) -> int:
    """Asked for in a process of its own, which takes what a trial's process takes before it begins."""
    import torch

    return torch.cuda.mem_get_info()[0]


def attempt(name: str, layers: int, options: Namespace, *, steps: int) -> dict:
    """One trial: refused, failed (`error` says why), or what it measured."""
    workload, plan = workload_of(layers, options), planned(name, layers, options)
    trial = {"mode": name, "layers": layers, "num_parameters": workload.shape.num_parameters, "room": _room(options)}
    trial |= {"fraction": plan["fraction"], "planned": plan, "refusal": plan["refusal"], "error": plan["refusal"]}
    if trial["refusal"]:
        print(f"  {name}, {layers} layers: refused, {trial['refusal']}", file=sys.stderr)
        return trial
    mode, kind = CONTENDERS[name]
    if kind == "part":
        mode += f"@offload_fraction={trial['fraction']:.6f}"
    spec = {"mode": mode, "workload": workload.to_dict(), "warmup": options.warmup, "steps": steps}
    spec |= {"host_floor_nbytes": int(options.floor_gib * GIB / 2), "device_nbytes": None}
    if options.device_gib is not None:
        spec["device_nbytes"] = int(options.device_gib * GIB)
    begin = time.monotonic()
    try:
        trial["result"] = _run("benchmarks.gpu_offload_worker:train", spec, options)
    except RemoteError as error:
        trial["error"] = str(error)
    trial["seconds"] = time.monotonic() - begin
    last = (trial["error"] or "trained").strip().splitlines()[-1]
    print(
        f"  {name}, {layers} layers, {workload.shape.num_parameters / 1e9:.2f} B, offloaded {trial['fraction']:.2f}: "
        f"{last} ({trial['seconds']:.0f} s)",
        file=sys.stderr,
    )
    return trial


def _print_largest(found: dict, options: Namespace) -> None:
    print(f"\n## The largest model that is trained (blocks of {options.size}, bf16, fp32 masters, recomputation)\n")
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
            f"{tokens_per_second(result, options):.0f}",
        ])  # fmt: skip
    print(markdown(["mode", "layers", "B", "offloaded", "device GiB", "host GiB", "tokens/s"], rows))


def tokens_per_second(result: dict, options: Namespace) -> float:
    return options.seq * options.batch / median(result["step_seconds"])


def _speed(options: Namespace, report: dict) -> tuple[dict, bool]:
    """All modes at the same sizes, and what each part of their step takes alone."""
    rates = report.get("rates") or _rates(options, report)[0]
    entries = {}
    for layers in options.layers or _sizes(report.get("largest", {})):
        compute = _compute_seconds(layers, options)
        trials = {
            name: attempt(name, layers, options, steps=options.steps)
            for name in options.modes
            if time.monotonic() < options.deadline
        }
        for trial in trials.values():
            if trial["error"] is None:
                trial["overlap"] = overlap(trial, compute, rates)
        entries[str(layers)] = {"compute_seconds": compute, "modes": trials}
        _print_speed(layers, entries[str(layers)], options)
    return {"rates": rates, "sizes": entries}, not entries


def _sizes(largest: dict) -> list[int]:
    """The largest with offload, and the largest that FSDP2 trains too."""
    return sorted({entry["layers"] for name, entry in largest.items() if entry["layers"] and name != "device"})[-2:]


def _compute_seconds(layers: int, options: Namespace) -> float | None:
    spec = {"workload": workload_of(layers, options).to_dict(), "warmup": options.warmup, "steps": options.steps}
    try:
        return median(_run("benchmarks.gpu_offload_worker:time_compute", spec, options)["seconds"])
    except RemoteError as error:
        print(f"  compute alone, {layers} layers: {error}", file=sys.stderr)
        return None


def overlap(trial: dict, compute: float | None, rates: dict) -> dict | None:
    """Seconds of the step's parts if each were alone, and how much of what could be hidden is.

    Hidden is 1 where the step takes as long as its longest part, 0 where it takes as long as all parts one after
    another.
    """
    result, num = trial["result"], trial["num_parameters"] * trial["fraction"]
    if compute is None or not result["bus_nbytes"]:
        return None
    bus = result["bus_nbytes"]
    parts = {
        "compute": compute,
        "transfer": bus.get("up", 0) / rates["up_nbytes_per_second"]
        + bus.get("down", 0) / rates["down_nbytes_per_second"],
        "update": num * sum(1 / rates[f"{work}_per_second"] for work in ("adamw", "to_fp32", "to_bf16")),
    }
    step, total, longest = median(result["step_seconds"]), sum(parts.values()), max(parts.values())
    hidden = (total - step) / (total - longest) if total > longest else None
    return parts | {"step": step, "sum": total, "hidden": hidden}


def _print_speed(layers: int, entry: dict, options: Namespace) -> None:
    trials = {name: trial for name, trial in entry["modes"].items() if trial["error"] is None}
    reference = trials.get("fsdp2-offload")
    rows = []
    for name, trial in trials.items():
        result, parts = trial["result"], trial["overlap"] or {}
        speed, bus, num = tokens_per_second(result, options), result["bus_nbytes"], trial["num_parameters"]
        ratio = speed / tokens_per_second(reference["result"], options) if reference else None
        cells = [f"{bus[way] / num:.2f}" if bus else "-" for way in ("down", "up")]
        cells += [_seconds(parts.get(part)) for part in ("compute", "transfer", "update", "sum")]
        hidden = parts.get("hidden")
        rows.append([
            name,
            f"{trial['fraction']:.2f}",
            _seconds(median(result["step_seconds"])),
            f"{speed:.0f}",
            f"{ratio:.3f}" if ratio else "-",
            *cells,
            "-" if hidden is None else f"{hidden:.2f}",
            f"{result['device_peak_nbytes'] / GIB:.2f}",
            f"{result['host_nbytes'] / GIB:.2f}",
            f"{result['losses'][-1]:.4f}",
        ])  # fmt: skip
    num = workload_of(layers, options).shape.num_parameters
    print(
        f"\n## {num / 1e9:.2f} B, {layers} layers, {options.batch} x {options.seq} tokens, bf16, recomputation, "
        f"{options.threads} threads\n"
    )
    header = ["mode", "offloaded", "step s", "tokens/s", "/ fsdp2-offload", "down", "up", "compute s", "transfer s"]
    header += ["update s", "sum s", "hidden", "device GiB", "host GiB", "last loss"]
    print(markdown(header, rows))
    for name, trial in entry["modes"].items():
        if trial["error"]:
            print(f"\n{name} failed: {trial['error'].strip().splitlines()[-1]}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_PARTS = {"exact": _exact, "rates": _rates, "largest": _largest, "speed": _speed}
