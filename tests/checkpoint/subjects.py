"""Sharded models and optimizers whose values are known, and ranks that are real gloo processes."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.checkpoint.manifest import Manifest, SavedRun, run_of
from hf_zero.comm import connect
from hf_zero.engine import NamedShard, ZeroEngine, engine_of
from tests import distributed
from tests.compare import weights_of


def world_of_one():
    return connect(torch.device("cpu"), timeout_seconds=60, bucket_nbytes=2**20)


def run_ranks(work, num_ranks: int, folder: Path, *args) -> None:
    """Runs `work(comm, folder, *args)` on every rank of a process group."""
    distributed.run_ranks(_on_rank, num_ranks, work, folder, args)


def _on_rank(work, folder: Path, args) -> None:
    work(world_of_one(), folder, *args)


def sharded(model: nn.Module, stage: int = 3, *, half: bool = False) -> ZeroEngine:
    """Shards a model; with `half` as one in bf16, whose fp32 masters have the given values."""
    if not half:
        return engine_of(hf_zero.shard(model, stage=stage))
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_of(hf_zero.shard(model.bfloat16(), stage=stage, compute_dtype=torch.bfloat16))
    fill(engine, lambda shard: part_of(exact[shard.name], shard))
    return engine


def fill(engine: ZeroEngine, values: Callable[[NamedShard], Tensor]) -> None:
    """Writes masters, as an update does."""
    engine.begin_update()
    for shard in engine.named_shards(resident=True):
        shard.tensor.copy_(values(shard))
    engine.mark_updated()


def part_of(whole: Tensor, shard: NamedShard) -> Tensor:
    return whole.detach().reshape(-1)[shard.start : shard.start + shard.tensor.numel()]


def values_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """Masters by name, 1-D; whole on one rank."""
    return {shard.name: shard.tensor.clone() for shard in engine.named_shards()}


def assert_shown(engine: ZeroEngine, model: nn.Module) -> None:
    """The model computes with these values, in its dtype."""
    for name, value in weights_of(engine.model).items():
        assert torch.equal(value, model.get_parameter(name).to(value.dtype)), name


def optimizer_of(engine: ZeroEngine, *, stepped: bool = True, lr: float = 0.1) -> hf_zero.ShardedOptimizer:
    """AdamW, with `stepped` in its twelfth step and with moments whose every element is known from its place."""
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=lr, betas=(0.9, 0.95))
    if stepped:
        optimizer.load_scalar_state({info.name: {"step": 12.0} for info in engine.param_infos() if info.trainable})
        for key, shard in optimizer.named_state_shards(resident=True):
            shard.tensor.copy_(part_of(expected_moment(shard.name, shard.shape, key), shard))
    return optimizer


def expected_moment(name: str, shape: torch.Size, key: str) -> Tensor:
    return torch.arange(shape.numel(), dtype=torch.float32) / 7 + sum(map(ord, name + key))


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def resealed(folder: Path, change=lambda run: None) -> None:
    """Writes the manifest of a folder anew, as if what lies there now had been saved, by a run whose record is
    changed."""
    run = run_of(folder)
    if run is not None:
        content = asdict(run)
        change(content)
        run = SavedRun(**content)
    Manifest.of_folder(folder, run=run).write(folder)
