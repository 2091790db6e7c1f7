"""hf_zero on NVIDIA GPUs: speed and memory, correctness of two ranks that share a device, and the largest model.

    python -m benchmarks.gpu                             # raw numbers go to benchmarks/results
    python -m benchmarks.gpu --parts shapes --num_processes 8
    python -m benchmarks.gpu --offload --help            # another program: what does not fit the device

Needs torch and transformers alone. `--dry` tries the parts `shapes` and `largest` where there is no GPU, `--device cpu
--size tiny` the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import gpu_offload
from benchmarks.gpu_shapes import MODES, SHAPES, largest_options, measure_shape
from benchmarks.launch import run_group
from benchmarks.machine import describe_gpu, describe_machine, one_line
from benchmarks.names import missing_package, parse_mode
from benchmarks.report import PHASES, markdown, worst
from benchmarks.workload import SIZES, Workload
from tests.distributed import RemoteError


# Largest accepted difference from the fp32 reference: (loss, relative norm, weight).
_TOLERANCES = {"fp32": (1e-4, 1e-3, 1e-4), "bf16": (5e-2, 5e-2, 5e-3)}
_CORRECTNESS_STEPS = 6
_RESULTS = Path(__file__).with_name("results")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--offload" in argv:
        return gpu_offload.main([word for word in argv if word != "--offload"])
    options = parse_arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = {"machine": describe_machine() | {"gpu": describe_gpu(options.device)}, "settings": vars(options).copy()}
    report["settings"]["json"] = None
    gpu = report["machine"]["gpu"]
    peak = _peak_tflops(options, gpu)
    of_peak = "no MFU, since the device is not known: --peak_tflops" if peak is None else f"MFU is of {peak:g} TFLOPS"
    print(f"{one_line(report['machine'])}; GPU: {gpu}; {of_peak}")
    failed = False
    for part in (part for part in _MEASURES if part in options.parts):
        failed = _MEASURES[part](options, report, peak) or failed
        path = _write(report, options)  # after each: it stays, whatever ends the next
    if path is not None:
        print(f"\nraw numbers: {path}")
    return 1 if failed else 0


def _speed(options: argparse.Namespace, report: dict, peak: float | None) -> bool:
    report["speed"] = measure_speed(options)
    report["speed_summary"] = summary = summarize_speed(report["speed"], options, peak)
    _print_speed(options, summary, report["speed"])
    return any(entry["error"] for entry in report["speed"].values())


def _ranks(options: argparse.Namespace, report: dict, peak: float | None) -> bool:
    report["ranks"] = check_ranks(options)
    _print_ranks(options, report["ranks"])
    return any(entry["error"] or not entry["agrees"] for entry in report["ranks"].values())


def _fragmentation(options: argparse.Namespace, report: dict, peak: float | None) -> bool:
    report["fragmentation"] = measure_fragmentation(options)
    return any(entry["error"] for part in report["fragmentation"].values() for entry in part.values())


def _shapes(options: argparse.Namespace, report: dict, peak: float | None) -> bool:
    report["shapes"] = {}
    for name in options.shapes:
        report["shapes"][name] = measure_shape(name, options, peak)
        _write(report, options)
    return any(mode["error"] for shape in report["shapes"].values() for mode in shape["modes"].values())


def _largest(options: argparse.Namespace, report: dict, peak: float | None) -> bool:
    report["largest"], failed = gpu_offload.find_largest(largest_options(options), report)
    return failed


# In the order in which they are measured: `largest` leaves settings of the allocator in the environment.
_MEASURES = {
    "shapes": _shapes,
    "ranks": _ranks,
    "speed": _speed,
    "fragmentation": _fragmentation,
    "largest": _largest,
}


def _write(report: dict, options: argparse.Namespace) -> Path | None:
    """Writes the raw numbers so far, and returns where; those of a GPU into benchmarks/results, unless told
    otherwise."""
    path = options.json
    if path is None and options.device == "cuda":
        name = re.sub(r"[^a-z0-9]+", "-", report["machine"]["gpu"].partition(",")[0].lower()).strip("-")
        path = _RESULTS / f"{report['machine']['date'][:10]}-gpu-{name}-{'-'.join(options.parts)}.json"
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--offload", action="store_true", help="another program: see --offload --help")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--modes", default="plain,plain-bf16,fsdp2,deepspeed-3,hf_zero-3", help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="1b", help="default: %(default)s")
    parser.add_argument("--seq", type=int, help="tokens per sequence (default: 2048, on a CPU 64)")
    parser.add_argument("--batch", type=int, help="sequences per step (default: 4, on a CPU 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per mode and round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--peak_tflops", type=float, help="for MFU, where the device is not known")
    parser.add_argument(
        "--parts", help=f"of {', '.join(_MEASURES)} (default: all but fragmentation; with --dry shapes,largest)"
    )
    parser.add_argument("--dry", action="store_true", help="tries shapes and largest on the CPU, with tiny models")
    parser.add_argument("--shapes", help="of 0.5b, 1.5b, 8b (default: all)")
    parser.add_argument("--shape_modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--num_processes", type=int, default=1, help="shapes: devices, each with a process")
    parser.add_argument("--largest_seconds", type=float, default=600, help="largest: no trial is begun after them")
    parser.add_argument("--lengths", type=int, default=200, help="steps of varying length (default: %(default)s)")
    parser.add_argument("--ranks_size", choices=SIZES, help="model of the two ranks (default: tiny, on a CPU smoke)")
    parser.add_argument("--stages", default="0,1,2,3", help="stages of the two ranks (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process group")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.dry:
        options.device, options.steps, options.warmup = "cpu", 1, 1
    _resolve_parts(parser, options)
    on_gpu = options.device == "cuda"
    options.seq = options.seq or (2048 if on_gpu else 64)
    options.ranks_size = options.ranks_size or ("tiny" if on_gpu else "smoke")
    options.stages = [int(stage) for stage in options.stages.split(",")]
    options.modes = [name for name in options.modes.split(",") if _present(parser, name)]
    return options


def _resolve_parts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.parts = (options.parts or ("shapes,largest" if options.dry else "shapes,ranks,speed,largest")).split(",")
    shapes = ("dry,dry-pure" if options.dry else "0.5b,1.5b,8b") if options.shapes is None else options.shapes
    options.shapes = shapes.split(",")
    options.shape_modes = [name for name in options.shape_modes.split(",") if _present(parser, name)]
    for name, known in (("parts", _MEASURES), ("shapes", SHAPES)):
        unknown = [word for word in getattr(options, name) if word not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r} is not one of {', '.join(known)}")


def _batch(options: argparse.Namespace) -> int:
    """Sequences per step of the parts that have no shapes of their own."""
    return options.batch or (4 if options.device == "cuda" else 1)


def _peak_tflops(options: argparse.Namespace, gpu: str) -> float | None:
    """Dense bf16 TFLOPS of a device, of which `gpu` is what `describe_gpu` says."""
    from hf_zero.recipes.telemetry import peak_flops  # here: processes that measure others import this module

    found = peak_flops(gpu.partition(",")[0])
    return options.peak_tflops or (found and found / 1e12)


def _present(parser: argparse.ArgumentParser, name: str) -> bool:
    try:
        parse_mode(name)
    except ValueError as error:
        parser.error(str(error))
    package = missing_package(name)
    if package:
        print(f"{name}: left out, the package {package!r} is not installed", file=sys.stderr)
    return package is None


def _start(options: argparse.Namespace) -> str:
    return "spawn" if options.device == "cuda" else "forkserver"


def measure_speed(options: argparse.Namespace) -> dict[str, dict]:
    """Each mode in a fresh process of its own per round, so that no mode inherits another's fragmentation."""
    workload = Workload(size=options.size, dtype="bf16", seq=options.seq, batch=_batch(options))
    raw = {name: {"rounds": [], "error": None} for name in options.modes}
    for number in range(options.rounds):
        shift = number % max(len(options.modes), 1)
        for name in options.modes[shift:] + options.modes[:shift]:
            if not raw[name]["error"]:
                _time_mode(raw[name], name, workload, options)
    return raw


def _time_mode(entry: dict, name: str, workload: Workload, options: argparse.Namespace) -> None:
    spec = {"mode": name, "workload": workload.to_dict(), "device": options.device}
    spec |= {"steps": options.steps, "warmup": options.warmup}
    try:
        entry["rounds"] += run_group(
            "benchmarks.gpu_worker:time_mode",
            spec,
            num_processes=1,
            timeout=options.timeout,
            backend="nccl" if options.device == "cuda" else "gloo",
            start=_start(options),
        )
    except RemoteError as error:
        entry["error"] = str(error)
        print(f"{name}: {error}", file=sys.stderr)


def summarize_speed(raw: dict[str, dict], options: argparse.Namespace, peak: float | None) -> dict[str, dict]:
    size = SIZES[options.size]
    flops = size.flops_per_token(options.seq) * options.seq * _batch(options)
    summaries = {}
    for name, entry in raw.items():
        if entry["error"]:
            continue
        rounds = [median(run["step_seconds"]) for run in entry["rounds"]]
        step = median(rounds)
        summaries[name] = {
            "step_seconds": step,
            "step_seconds_per_round": rounds,
            "phases": {
                phase: median(step[phase] for run in entry["rounds"] for step in run["phases"]) for phase in PHASES
            },
            "host_seconds": median(run["host_seconds"] for run in entry["rounds"]),
            "tflops": flops / step / 1e12,
            "mfu": flops / step / 1e12 / peak if peak else None,
            "last_loss": entry["rounds"][0]["losses"][-1],
            "memory": entry["rounds"][-1]["memory"],
        }
    for summary in summaries.values():
        summary["ratios"] = {reference: _ratio(summary, other) for reference, other in summaries.items()}
    return summaries


def _ratio(summary: dict, reference: dict) -> float:
    pairs = zip(summary["step_seconds_per_round"], reference["step_seconds_per_round"], strict=True)
    return median(mine / theirs for mine, theirs in pairs)


def _print_speed(options: argparse.Namespace, summaries: dict[str, dict], raw: dict[str, dict]) -> None:
    size = SIZES[options.size]
    print(
        f"\n## One process, bf16, {size.num_parameters / 1e6:.0f} M, {_batch(options)} x {options.seq} tokens, "
        f"{options.rounds} rounds of {options.steps} steps\n"
    )
    references = [name for name in ("plain", "plain-bf16", "fsdp2") if name in summaries]
    header = ["mode", "step ms", "min-max", *PHASES, "host ms", "MFU", "rest MiB", "peak MiB", "reserved MiB"]
    header += ["allocations/step", "device allocations", *(f"/ {name}" for name in references), "last loss"]
    rows = [[name, *_speed_cells(summary, references)] for name, summary in summaries.items()]
    print(markdown(header, rows))
    for name, entry in raw.items():
        if entry["error"]:
            print(f"\n{name} failed: {entry['error'].strip().splitlines()[-1]}")


def _speed_cells(summary: dict, references: list[str]) -> list[str]:
    memory, rounds = summary["memory"], summary["step_seconds_per_round"]

    def mib(key: str) -> str:
        return f"{memory[key] / 2**20:.0f}" if memory else "-"

    return [
        f"{summary['step_seconds'] * 1e3:.2f}",
        f"{min(rounds) * 1e3:.2f}-{max(rounds) * 1e3:.2f}",
        *(f"{summary['phases'][phase] * 1e3:.2f}" for phase in PHASES),
        f"{summary['host_seconds'] * 1e3:.2f}",
        "-" if summary["mfu"] is None else f"{summary['mfu']:.1%}",
        *(mib(key) for key in ("rest_allocated_nbytes", "peak_allocated_nbytes", "peak_reserved_nbytes")),
        f"{memory['allocations_per_step']:.0f}" if memory else "-",
        f"{memory['device_allocations']}" if memory else "-",
        *(f"{summary['ratios'][reference]:.3f}" for reference in references),
        f"{summary['last_loss']:.4f}",
    ]


def check_ranks(options: argparse.Namespace) -> dict[str, dict]:
    """Two gloo ranks on one device against one process on the CPU, stage by stage, in fp32 and bf16."""
    workload = Workload(size=options.ranks_size, seq=64)
    spec = {"num_ranks": 2, "steps": _CORRECTNESS_STEPS, "workload": workload.to_dict(), "device": options.device}
    checks = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        spec["weights"] = str(Path(folder) / "weights.pt")
        group = {"timeout": options.timeout, "start": _start(options)}
        reference = run_group("benchmarks.gpu_worker:train_reference", spec, num_processes=1, **group)[0]
        for dtype, stage in itertools.product(("fp32", "bf16"), options.stages):
            name = f"hf_zero-{stage} {dtype}"
            job = spec | {"stage": stage, "workload": replace(workload, dtype=dtype).to_dict()}
            try:
                ranks = run_group("benchmarks.gpu_worker:train_rank", job, num_processes=2, **group)
                checks[name] = _compare(ranks, reference, dtype) | {"error": None}
            except RemoteError as error:
                checks[name] = {"error": str(error), "agrees": False}
                print(f"{name}: {error}", file=sys.stderr)
    for name, check in checks.items():
        first = checks[f"hf_zero-{options.stages[0]} {name.split()[1]}"]
        check["as_first_stage"] = None if check["error"] or first["error"] else check["losses"] == first["losses"]
    return checks


def _compare(ranks: list[dict], reference: dict, dtype: str) -> dict:
    """Largest differences over ranks and steps."""
    losses = [list(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    loss = worst(
        abs(mine - theirs)
        for step, wanted in zip(losses, reference["losses"], strict=True)
        for mine, theirs in zip(step, wanted, strict=True)
    )
    norm = worst(
        abs(mine - theirs) / theirs
        for rank in ranks
        for mine, theirs in zip(rank["norms"], reference["norms"], strict=True)
    )
    weight = worst(rank["weight_difference"] for rank in ranks)
    found = (loss, norm, weight)
    agrees = all(value <= limit for value, limit in zip(found, _TOLERANCES[dtype], strict=True))
    return {"loss": loss, "norm": norm, "weight": weight, "losses": losses, "agrees": agrees}


def _print_ranks(options: argparse.Namespace, checks: dict[str, dict]) -> None:
    size = SIZES[options.ranks_size]
    print(
        f"\n## Two gloo ranks on one device ({options.device}) against one CPU process in fp32, "
        f"{size.num_parameters / 1e6:.1f} M, {_CORRECTNESS_STEPS} steps\n"
    )
    rows = []
    for name, check in checks.items():
        if check["error"]:
            rows.append([name, "-", "-", "-", "-", "failed"])
            continue
        values = [f"{check[key]:.1e}" for key in ("loss", "norm", "weight")]
        same = "-" if check["as_first_stage"] is None else str(check["as_first_stage"]).lower()
        rows.append([name, *values, same, "yes" if check["agrees"] else "NO"])
    print(
        markdown(
            [
                "stage",
                "loss diff",
                "norm diff, relative",
                "weight diff",
                f"equal to stage {options.stages[0]}",
                "agrees",
            ],
            rows,
        )
    )


def measure_fragmentation(options: argparse.Namespace) -> dict[str, dict]:
    """All modes in one process, then the stages on two ranks that share the device, where ZeRO's own slots are."""
    from benchmarks import fragmentation

    group = {"device": options.device, "timeout": options.timeout, "start": _start(options)}
    alone = Workload(size=options.size, dtype="bf16", seq=options.seq, batch=_batch(options))
    shared = replace(alone, size=options.ranks_size)
    backend = "nccl" if options.device == "cuda" else "gloo"
    jobs = {
        1: (options.modes, alone, {**group, "backend": backend}),
        2: ([f"hf_zero-{stage}" for stage in options.stages], shared, group),
    }
    found = {}
    for num_ranks, (modes, workload, settings) in jobs.items():
        key = f"{num_ranks} rank(s)"
        found[key] = fragmentation.measure(modes, workload, steps=options.lengths, num_ranks=num_ranks, group=settings)
        fragmentation.print_table(found[key], workload, steps=options.lengths, num_ranks=num_ranks)
    return found


if __name__ == "__main__":
    sys.exit(main())
