"""Where one step's time goes, by kind of operator.

    python -m benchmarks.profile --modes hf_zero-3,ddp --size small

Two tables: seconds of each kind per step (operators alone; what no operator covers is Python, waiting and page faults
of the allocator), and the largest operators of each mode. Means over ranks and profiled steps.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.launch import run_group, set_environment
from benchmarks.machine import describe_machine, one_line
from benchmarks.modes import split_modes
from benchmarks.report import markdown
from benchmarks.workload import SIZES, Workload


# Kinds by what an operator's name begins with; the first that fits counts, "elementwise" is the rest.
KINDS = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "aten::_scaled_dot_product"),
    "optimizer": ("aten::_fused_adam",),
    "norm": ("aten::linalg_vector_norm", "aten::_foreach_norm"),
    "copy": ("aten::copy_", "aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy", "aten::_foreach_copy"),
    "fill": ("aten::zero_", "aten::fill_"),
    "collective": ("c10d::", "gloo:", "nccl:", "record_param_comms"),
    "elementwise": ("",),
}
_STEPS = 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="plain,ddp,hf_zero-1,hf_zero-3", help="default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--top", type=int, default=8, help="operators to list per mode (default: %(default)s)")
    options = parser.parse_args(argv)
    names = split_modes(parser, options.modes)
    set_environment(threads=1)
    print(f"{one_line(describe_machine())}\n")
    workload = Workload(size=options.size, dtype=options.dtype, seq=options.seq)
    profiles = {}
    for name in names:
        spec = {"mode": name, "workload": workload.to_dict()}
        ranks = run_group("benchmarks.profile:profile_rank", spec, num_processes=options.num_processes, timeout=600)
        profiles[name] = _mean(ranks)
    rows = [
        [name, *(f"{1e3 * value:.0f}" for value in by_kind(profile).values())] for name, profile in profiles.items()
    ]
    print(markdown(["ms per step", *KINDS, "in no operator", "step"], rows))
    for name, profile in profiles.items():
        largest = sorted(profile["operators"].items(), key=lambda item: -item[1][0])[: options.top]
        rows = [[key, f"{1e3 * seconds:.1f}", f"{calls:.0f}"] for key, (seconds, calls) in largest]
        print(f"\n{markdown([name, 'ms', 'calls'], rows)}")
    return 0


def by_kind(profile: dict) -> dict[str, float]:
    """Seconds per step of each kind, of no operator, and of the step."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for key, (spent, _) in profile["operators"].items():
        seconds[next(kind for kind, starts in KINDS.items() if key.startswith(starts))] += spent
    rest = profile["step_seconds"] - sum(seconds.values())
    return {**seconds, "in no operator": rest, "step": profile["step_seconds"]}


def profile_rank(spec: dict, rank: int) -> dict:
    """Profiles some steps of one mode after warm-up: seconds and calls per step by operator, without its callees."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.worker import Stepper

    stepper = Stepper.build(spec["mode"], Workload(**spec["workload"]), rank)
    stepper.run(2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        stepper.run(1)  # the profiler's own warm-up
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        stepper.run(_STEPS)
        seconds = time.perf_counter() - begin
    operators = {
        event.key: (event.self_cpu_time_total / 1e6 / _STEPS, event.count / _STEPS)
        for event in profiler.key_averages()
        if event.key.startswith(("aten::", "c10d::", "gloo:", "nccl:", "mkldnn", "record_param_comms"))
    }
    return {"operators": operators, "step_seconds": seconds / _STEPS}


def _mean(ranks: list[dict]) -> dict:
    keys = {key for rank in ranks for key in rank["operators"]}
    sums = {
        key: [sum(rank["operators"].get(key, (0, 0))[i] for rank in ranks) / len(ranks) for i in (0, 1)]
        for key in keys
    }
    return {"operators": sums, "step_seconds": sum(rank["step_seconds"] for rank in ranks) / len(ranks)}


if __name__ == "__main__":
    sys.exit(main())
