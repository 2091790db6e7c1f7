"""What a rank takes to start, by the number of ranks: CPU time and host memory, as one of many without the others.

The rank is of torch's `fake` process groups, whose collectives return at once with what this rank sends. The model is
on the meta device, so no tensor takes memory or time: what is measured is the host's own work, of which shapes and
optimizers decide. Each line is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import markdown
from hf_zero.comm import connect
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
    """What one rank took, in seconds of CPU time and MiB.

    Args:
        size (`str`): of the model.
        num_ranks (`int`): how many there are.
        connect (`float`): to know the other ranks.
        shard (`float`): to build the engine.
        adamw (`float`): to build AdamW's `ShardedOptimizer`.
        muon (`float`): likewise Muon's, which moves whole matrices between ranks.
        memory (`float`): by how much the process grew.
    """

    size: str
    num_ranks: int
    connect: float
    shard: float
    adamw: float
    muon: float
    memory: float


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


def start(size: str, num_ranks: int) -> Start:
    """Starts the rank in the middle of so many, in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = model_of(size)
    dist.init_process_group("fake", store=FakeStore(), rank=num_ranks // 2, world_size=num_ranks)
    gc.collect()
    before, kept = _resident_mib(), []

    def seconds(act: Callable[[], object]) -> float:
        begun = time.process_time()
        kept.append(act())
        return time.process_time() - begun

    def sharded() -> object:
        comm = kept[0]
        comm.device = META  # of tensors; small collectives stay on the CPU
        return build(model, config, comm, bus=LoneBus(comm.counters, Meter()))

    config = ZeroConfig(stage=3, compute_dtype=torch.bfloat16)
    found = Start(
        size,
        num_ranks,
        connect=seconds(lambda: connect(torch.device("cpu"), bucket_nbytes="auto")),
        shard=seconds(sharded),
        adamw=seconds(lambda: ShardedOptimizer(model, torch.optim.AdamW)),
        muon=seconds(lambda: ShardedOptimizer(model, MuonWithAdamW()(model))),
        memory=_resident_mib() - before,
    )
    dist.destroy_process_group()
    return found


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _least(found: list[Start]) -> Start:
    """Takes the least of each number: what disturbs a measurement adds to it."""
    fields = [asdict(each) for each in found]
    return Start(**{key: min(each[key] for each in fields) for key in fields[0]})


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="8B,70B,405B", help=f"of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts; default: %(default)s")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args(argv)
    sizes, ranks = options.sizes.split(","), [int(each) for each in options.ranks.split(",")]
    if unknown := sorted(set(sizes) - set(SHAPES)):
        parser.error(f"--sizes {unknown[0]}: give some of {', '.join(SHAPES)}")
    os.environ.pop("WORLD_SIZE", None)
    start("tiny", 2)  # what is imported and made once is in every process then
    context, found = multiprocessing.get_context("fork"), []
    for size in sizes:
        for num_ranks in ranks:
            rounds = []
            for _ in range(options.rounds):
                with context.Pool(1) as pool:
                    rounds.append(pool.apply(start, (size, num_ranks)))
            found.append(_least(rounds))
    rows = [
        [each.size, str(each.num_ranks)]
        + [f"{seconds:.3f}" for seconds in (each.connect, each.shard, each.adamw, each.muon)]
        + [f"{each.memory:.1f}"]
        for each in found
    ]
    print(markdown(["model", "ranks", "connect s", "shard s", "AdamW s", "Muon s", "host MiB"], rows))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(each) for each in found], file, indent=1)


if __name__ == "__main__":
    main()
