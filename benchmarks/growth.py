"""What a rank takes to start, by the number of ranks: CPU time and host memory, as one of many without the others.

The rank is in one of torch's `fake` process groups, whose collectives return at once. The model is on the meta device,
so no tensor takes memory or time: this measures the host's own work. `--calls` counts function calls instead of CPU
time, which are the same on every machine. Each measurement has its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import counters
from benchmarks.machine import describe_machine
from benchmarks.report import MIB, markdown
from hf_zero.comm import connect
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.optim import MuonWithAdamW, ShardedOptimizer
from hf_zero.planner.lone_rank import META, LoneBus
from hf_zero.planner.meter import Meter


# Hidden size, size of the feed-forward layer, layers, heads and key-value heads of Llama 3.
SHAPES = {
    "tiny": (64, 176, 2, 4, 2),
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}
RANKS = (8, 64, 512, 4096)
# Connecting, building the engine, and building each optimizer. Muon and Adafactor update whole matrices on one rank.
ACTS = ("connect", "shard", "adamw", "muon", "adafactor")


def cpu_seconds(act: Callable[[], object]) -> tuple[object, float]:
    begin = time.process_time()
    made = act()
    return made, time.process_time() - begin


def calls(act: Callable[[], object]) -> tuple[object, int]:
    """Counts the calls of functions."""
    counted = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.disable()  # what it finalizes, and when, depends on the process
    sys.setprofile(see)
    try:
        made = act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return made, counted


def model_of(size: str) -> nn.Module:
    """Makes a Llama on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads, kv_heads = SHAPES[size]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    with META:
        return LlamaForCausalLM(config)


def start(size: str, num_ranks: int, measure: Callable = cpu_seconds) -> dict:
    """Starts the rank in the middle, in this process.

    Returns:
        `size`, `num_ranks`, what each of `ACTS` took, and `memory`: the MiB by which the process grew.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = model_of(size)
    dist.init_process_group("fake", store=FakeStore(), rank=num_ranks // 2, world_size=num_ranks)
    gc.collect()
    before, made = counters.resident_nbytes(), {}

    def shard() -> object:
        comm: Any = made["connect"]
        comm.all_gather_object = partial(_gathered_on_cpu, comm, comm.all_gather_object)
        comm.device = META  # of tensors; small collectives stay on the CPU
        return build(model, config, comm, bus=LoneBus(comm.counters, Meter()))

    config = ZeroConfig(stage=3, compute_dtype=torch.bfloat16)
    acts = (
        lambda: connect(torch.device("cpu"), bucket_nbytes="auto"),
        shard,
        lambda: ShardedOptimizer(model, torch.optim.AdamW),
        lambda: ShardedOptimizer(model, MuonWithAdamW()(model)),
        lambda: ShardedOptimizer(model, torch.optim.Adafactor),
    )
    found = {"size": size, "num_ranks": num_ranks}
    for name, act in zip(ACTS, acts, strict=True):
        made[name], found[name] = measure(act)
    found["memory"] = (counters.resident_nbytes() - before) / MIB
    dist.destroy_process_group()
    return found


def _gathered_on_cpu(comm: Any, gather: Callable[..., list], obj: object, **kwargs) -> list:
    before, comm.device = comm.device, torch.device("cpu")
    try:
        return gather(obj, **kwargs)
    finally:
        comm.device = before


def least(size: str, num_ranks: int, measure: Callable, rounds: int) -> dict:
    """The least of each number over some processes, in which imports are done: disturbances only add to it."""
    found = []
    for _ in range(rounds):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(start, (size, num_ranks, measure)))
    return {key: min(each[key] for each in found) for key in found[0]}


def table(found: list[dict]) -> str:
    """One row for each size and number of ranks."""
    rows = []
    for each in found:
        numbers = [f"{each[name]:.{0 if isinstance(each[name], int) else 3}f}" for name in ACTS]
        rows.append([each["size"], str(each["num_ranks"]), *numbers, f"{each['memory']:.1f}"])
    return markdown(["model", "ranks", "connect", "shard", "AdamW", "Muon", "Adafactor", "host MiB"], rows)


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    os.environ.pop("WORLD_SIZE", None)
    start("tiny", 2)  # imports
    measure, rounds = (calls, 1) if options.calls else (cpu_seconds, options.rounds)
    found = [least(size, num_ranks, measure, rounds) for size in options.sizes for num_ranks in options.ranks]
    print(table(found))
    if options.json:
        report = {"machine": describe_machine(), "calls": options.calls, "start": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="8B,70B,405B", help=f"of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="the least counts; default: %(default)s")
    parser.add_argument("--calls", action="store_true", help="count function calls instead of CPU time")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(argv)
    options.sizes, options.ranks = options.sizes.split(","), [int(each) for each in options.ranks.split(",")]
    if unknown := sorted(set(options.sizes) - set(SHAPES)):
        parser.error(f"--sizes {unknown[0]}: give some of {', '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
