"""What a rank takes to start, by the number of ranks: CPU time and host memory, as one of many without the others.

The rank is of torch's `fake` process groups, whose collectives return at once with what this rank sends. The model is
on the meta device, so no tensor takes memory or time: what is measured is the host's own work, of which shapes and
optimizers decide. `--calls` counts calls of functions in place of CPU time: they are the same on each machine.
`--from_scratch` gives the model initial values besides: the rank computes its own ranges, on the CPU. Each line is a
process of its own.
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
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from benchmarks import counters
from benchmarks.machine import describe_machine
from benchmarks.report import MIB, markdown
from hf_zero.comm import connect
from hf_zero.comm.distributed import DistributedComm
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.optim import MuonWithAdamW, ShardedOptimizer
from hf_zero.planner.lone_rank import META, LoneBus
from hf_zero.planner.meter import Meter


# Width, width of the feed-forward layer, layers, heads and key-value heads of Llama 3.
SHAPES = {
    "tiny": (64, 176, 2, 4, 2),
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}
RANKS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Start:
    """What one rank took, in seconds of CPU time or in calls, and in MiB.

    Args:
        size (`str`): of the model.
        num_ranks (`int`): how many there are.
        connect (`float`): to know the other ranks.
        shard (`float`): to build the engine.
        adamw (`float`): to build AdamW's `ShardedOptimizer`.
        muon, adafactor (`float`): likewise those of Muon and Adafactor, which update whole matrices on one rank.
        memory (`float`): by how much the process grew.
    """

    size: str
    num_ranks: int
    connect: float
    shard: float
    adamw: float
    muon: float
    adafactor: float
    memory: float


@dataclass(frozen=True)
class FromScratch:
    """What one rank took to give a model of the meta device initial values, in seconds of CPU time and MiB.

    Args:
        size, num_ranks: as for `Start`.
        seconds (`float`): to build the engine with its values.
        memory, peak (`float`): by how much the process grew, in the end and at most.
    """

    size: str
    num_ranks: int
    seconds: float
    memory: float
    peak: float


# What an act returns, and how much it took.
Measure = Callable[[Callable[[], object]], tuple[object, float]]


def cpu_seconds(act: Callable[[], object]) -> tuple[object, float]:
    """Measures CPU time."""
    begun = time.process_time()
    made = act()
    return made, time.process_time() - begun


def calls(act: Callable[[], object]) -> tuple[object, float]:
    """Counts the calls of functions."""
    counted = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.disable()  # what it finalizes, and when, is of the process
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


def _gathered_on_cpu(comm: Any, gather: Callable[..., list], obj: object, **kwargs) -> list:
    before, comm.device = comm.device, torch.device("cpu")
    try:
        return gather(obj, **kwargs)
    finally:
        comm.device = before


def start(size: str, num_ranks: int, measure: Measure = cpu_seconds) -> Start:
    """Starts the rank in the middle of so many, in this process."""
    model = model_of(size)
    _join(num_ranks)
    gc.collect()
    before, kept = counters.resident_nbytes(), []

    def taken(act: Callable[[], object]) -> float:
        made, number = measure(act)
        kept.append(made)
        return number

    def sharded() -> object:
        comm: Any = kept[0]
        comm.all_gather_object = partial(_gathered_on_cpu, comm, comm.all_gather_object)
        comm.device = META  # of tensors; small collectives stay on the CPU
        return build(model, config, comm, bus=LoneBus(comm.counters, Meter()))

    config = ZeroConfig(stage=3, compute_dtype=torch.bfloat16)
    found = Start(
        size,
        num_ranks,
        connect=taken(lambda: connect(torch.device("cpu"), bucket_nbytes="auto")),
        shard=taken(sharded),
        adamw=taken(lambda: ShardedOptimizer(model, torch.optim.AdamW)),
        muon=taken(lambda: ShardedOptimizer(model, MuonWithAdamW()(model))),
        adafactor=taken(lambda: ShardedOptimizer(model, torch.optim.Adafactor)),
        memory=(counters.resident_nbytes() - before) / MIB,
    )
    dist.destroy_process_group()
    return found


def start_from_scratch(size: str, num_ranks: int) -> FromScratch:
    """As `start`, with initial values on the CPU, in fp32, by what users call."""
    model = model_of(size)
    _join(num_ranks)
    gc.collect()
    before = counters.resident_nbytes()
    counters.reset_resident_peak()
    # a fake group brings nothing of rank 0: here the seed
    with mock.patch.object(DistributedComm, "broadcast_object", lambda self, obj: obj):
        sharded, seconds = cpu_seconds(lambda: hf_zero.shard(model, stage=3, compute_dtype=torch.bfloat16))
    gc.collect()
    grown = [each - before for each in (counters.resident_nbytes(), counters.resident_peak_nbytes())]
    found = FromScratch(size, num_ranks, seconds, *(each / MIB for each in grown))
    del sharded
    dist.destroy_process_group()
    return found


def _join(num_ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=num_ranks // 2, world_size=num_ranks)


def in_a_process(act: Callable) -> Any:
    """Calls it in a process of its own, in which what is imported and made once is there already."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act)


def _least(found: list[Start]) -> Start:
    """Takes the least of each number: what disturbs a measurement adds to it."""
    fields = [asdict(each) for each in found]
    return Start(**{key: min(each[key] for each in fields) for key in fields[0]})


def table(found: list[Start]) -> str:
    """One row for each size and number of ranks."""
    rows = [
        [each.size, str(each.num_ranks)]
        + [
            f"{number:.0f}" if isinstance(number, int) else f"{number:.3f}"
            for number in (each.connect, each.shard, each.adamw, each.muon, each.adafactor)
        ]
        + [f"{each.memory:.1f}"]
        for each in found
    ]
    return markdown(["model", "ranks", "connect", "shard", "AdamW", "Muon", "Adafactor", "host MiB"], rows)


def table_from_scratch(found: list[FromScratch]) -> str:
    """Likewise."""
    rows = [
        [each.size, str(each.num_ranks), f"{each.seconds:.0f}", f"{each.memory:.0f}", f"{each.peak:.0f}"]
        for each in found
    ]
    return markdown(["model", "ranks", "seconds", "MiB", "peak MiB"], rows)


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints a table."""
    options = parse_arguments(argv)
    os.environ.pop("WORLD_SIZE", None)
    start("tiny", 2)  # what is imported and made once is in every process then
    found: dict[str, list] = {"start": [], "from_scratch": []}
    for size in options.sizes:
        for num_ranks in options.ranks:
            if options.from_scratch:
                found["from_scratch"].append(in_a_process(partial(start_from_scratch, size, num_ranks)))
                continue
            measure = calls if options.calls else cpu_seconds
            act = partial(start, size, num_ranks, measure)
            found["start"].append(_least([in_a_process(act) for _ in range(1 if options.calls else options.rounds)]))
    print(table_from_scratch(found["from_scratch"]) if options.from_scratch else table(found["start"]))
    if options.json:
        told = {key: [asdict(each) for each in rows] for key, rows in found.items() if rows}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": describe_machine(), "calls": options.calls, **told}, file, indent=1)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="8B,70B,405B", help=f"of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts; default: %(default)s")
    parser.add_argument("--calls", action="store_true", help="counts calls of functions in place of CPU time")
    parser.add_argument("--from_scratch", action="store_true", help="gives the model initial values, on the CPU")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args(argv)
    options.sizes, options.ranks = options.sizes.split(","), [int(each) for each in options.ranks.split(",")]
    if unknown := sorted(set(options.sizes) - set(SHAPES)):
        parser.error(f"--sizes {unknown[0]}: give some of {', '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
