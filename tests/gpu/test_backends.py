"""Ranks that are processes: two through gloo, which may share one device, and one through the device's own backend."""

import copy

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.distributed import NativeComm
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import ROUNDING, make_inner, tiny_llama, train_plain, train_sharded
from tests.device.backend import NAME
from tests.distributed import run_new_ranks
from tests.gpu.late import BITS_ROUNDING, BUCKET_NBYTES
from tests.staged import gloo_on_devices


def _in_processes(device: torch.device, act, num_ranks: int, backend: str) -> list:
    """A process that was forked may not be able to open a device."""
    start = "forkserver" if device.type == "cpu" else "spawn"
    return run_new_ranks(act, num_ranks, str(device), backend=backend, start=start, timeout=240.0)


# By name: settings, and how near the training has to come to plain torch.
SENT = {
    "stage 1": (dict(stage=1), ROUNDING),
    "stage 3": (dict(stage=3), ROUNDING),
    "stage 3, bits": (dict(stage=3, gather_dtype=torch.int8, reduce_dtype=torch.int8), BITS_ROUNDING),
    "groups": (dict(stage=2, shard_size=1), ROUNDING),
    "shared sequences": (dict(stage=3, sequence_parallel=2), ROUNDING),
    "chunked loss and tiled MLPs": (dict(stage=3, chunked_loss="on", tiled_mlp=3), ROUNDING),
}


def _trains_through_gloo(place: str) -> dict[str, float]:
    """How far each way is from plain torch, as a user shards."""
    device, model, found = torch.device(place), tiny_llama(), {}
    for name, (settings, _) in SENT.items():
        share = settings.get("sequence_parallel", 1)
        plain = train_plain(copy.deepcopy(model).to(device), 2 // share, device)
        subject = copy.deepcopy(model).to(device)
        with gloo_on_devices():
            hf_zero.shard(subject, device=device, shared_memory=False, bucket_nbytes=BUCKET_NBYTES, **settings)
        optimizer = ShardedOptimizer(subject, make_inner("adamw", subject.parameters()))
        batch_of = dist.get_rank() // share
        trained = train_sharded(subject, optimizer, batch_of, device, range(3), clips=True)
        differences = trained.differences(plain[batch_of])
        found[name] = max(differences["losses"], differences["norms"])
    return found


def test_two_ranks_of_gloo_on_one_device_agree_with_plain_torch(device):
    backend = "gloo" if device.type in ("cpu", "cuda") else f"cpu:gloo,{device.type}:gloo"
    for rank, found in enumerate(_in_processes(device, _trains_through_gloo, 2, backend)):
        assert all(found[name] < bound for name, (_, bound) in SENT.items()), f"rank {rank}: {found}"


def _trains_alone(place: str) -> float:
    """How far one rank's training is from plain torch, whose collectives are nevertheless the backend's."""
    device, model = torch.device(place), tiny_llama()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    (plain,) = train_plain(copy.deepcopy(model).to(device), 1, device)
    comm = NativeComm(dist.group.WORLD, device, 60.0, BUCKET_NBYTES)
    engine = build(copy.deepcopy(model).to(device), ZeroConfig(stage=3, strict=True), comm)
    optimizer = ShardedOptimizer(engine, make_inner("adamw", engine.model.parameters()))
    trained = train_sharded(engine.model, optimizer, 0, device, range(3), clips=True)
    return max(trained.differences(plain).values())


def test_the_backend_itself_serves_one_rank(device):
    """NCCL's own kernels, on streams of its own."""
    if device.type == NAME:
        pytest.skip("the test device has no backend of its own")
    (found,) = _in_processes(device, _trains_alone, 1, "nccl" if device.type == "cuda" else "gloo")
    assert found < ROUNDING
