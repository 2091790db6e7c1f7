"""What users switch on: loss scale, fused optimizers, torch.compile, flash attention, saves in the background."""

import copy
import random
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.checkpoint import Checkpoint
from hf_zero.comm import Comm
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import Trained, make_inner, random_batch, tiny_llama, train_sharded
from tests.gpu.late import BF16_ROUNDING, NUM_RANKS, assert_same, run_ranks_late, slowed, start


def _scaled(model: nn.Module, stage: int, device: torch.device, comm: Comm) -> tuple[Trained, list[float], list[bool]]:
    """Trains in fp16; in step 1 the gradients of rank 1 overflow."""
    engine = start(comm, copy.deepcopy(model).to(device), stage=stage, compute_dtype=torch.float16, nonfinite="ignore")
    optimizer = ShardedOptimizer(engine, make_inner("adamw", engine.model.parameters()))
    scaler = hf_zero.ZeroGradScaler(device.type, init_scale=2.0**8, growth_interval=2)
    scales, moved, losses = [], [], []
    for step in range(4):
        before = _weights(engine.model)
        loss = engine.model(**random_batch(comm.rank, step, device)).loss
        losses.append(loss.detach())
        scaler.scale(loss * (float("inf") if step == comm.rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = _weights(engine.model)
        moved.append(any(not torch.equal(after[name], value) for name, value in before.items()))
    return Trained(torch.stack(losses).float().cpu(), torch.zeros(0), _weights(engine.model)), scales, moved


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with hf_zero.gathered(model):
        return {name: param.detach().float().cpu() for name, param in model.named_parameters()}


def test_an_overflow_on_one_rank_skips_the_step_on_all(device):
    model = tiny_llama()
    first, third = (run_ranks_late(device, partial(_scaled, model, stage, device)) for stage in (0, 3))
    assert_same([trained for trained, *_ in third], [trained for trained, *_ in first], "stage 3 and stage 0")
    for _, scales, moved in [*first, *third]:
        assert scales == [2.0**8, 2.0**7, 2.0**7, 2.0**8]
        assert moved == [True, False, True, True]


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True),
        partial(torch.optim.Adam, lr=1e-3, eps=1e-4, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, foreach=True),
    ],
    ids=["adamw", "adam", "sgd", "adamw-foreach"],
)
def test_fused_optimizers_step_alike_at_all_stages(device, make):
    model = tiny_llama()

    def play(stage: int, dtype: torch.dtype | None, comm: Comm) -> Trained:
        engine = start(comm, copy.deepcopy(model).to(device), stage=stage, compute_dtype=dtype)
        optimizer = ShardedOptimizer(engine, make(engine.model.parameters()))
        return train_sharded(engine.model, optimizer, comm.rank, device, range(3), clips=True)

    for dtype in (None, torch.bfloat16):
        first = run_ranks_late(device, partial(play, 0, dtype))
        for stage in (1, 2, 3):
            assert_same(run_ranks_late(device, partial(play, stage, dtype)), first, f"stage {stage}, {dtype}")


def _alone(device: torch.device, stage: int, attention: str = "eager", backend: str = "", **settings) -> Trained:
    """Trains in one process, which behaves as one of several."""
    model = tiny_llama(attention).to(device)
    hf_zero.shard(model, stage=stage, strict=True, **settings)
    if backend:
        torch._dynamo.reset()
        hf_zero.compile_blocks(model, backend=backend)
    optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
    return train_sharded(model, optimizer, 0, device, range(3), clips=True)


@pytest.mark.parametrize("dtype, bound", [(None, 1e-4), (torch.bfloat16, BF16_ROUNDING)], ids=["fp32", "bf16"])
def test_compiled_blocks_train_as_others(device, dtype, bound):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    for stage in (0, 3):
        eager = _alone(device, stage, compute_dtype=dtype)
        found = _alone(device, stage, backend=backend, compute_dtype=dtype).differences(eager)
        assert found["losses"] < bound, f"stage {stage}: {found}"


def test_flash_attention_trains_as_eager_attention(device):
    eager = _alone(device, 3, compute_dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # any other is refused
        flash = [_alone(device, stage, "sdpa", compute_dtype=torch.bfloat16) for stage in (0, 3)]
    for trained in flash:
        assert trained.differences(eager)["losses"] < BF16_ROUNDING
    assert_same(flash[1:], flash[:1], "stage 3 and stage 0")


def test_a_save_in_the_background_has_the_values_of_its_moment(device, delays, tmp_path, monkeypatch):
    model, write = tiny_llama(), Checkpoint._write
    has_gone_on = threading.Barrier(2 * NUM_RANKS, timeout=60)

    def write_late(*args) -> None:
        has_gone_on.wait()  # nothing is written before all ranks have trained further
        write(*args)

    monkeypatch.setattr(Checkpoint, "_write", write_late)

    def play(delay: str, comm: Comm) -> Trained:
        engine = start(comm, copy.deepcopy(model).to(device), stage=3)
        optimizer = ShardedOptimizer(engine, make_inner("adamw", engine.model.parameters()))
        with slowed(engine, delay, random.Random(f"{delay} {comm.rank}")):
            saved = train_sharded(engine.model, optimizer, comm.rank, device, range(2), clips=True)
            saving = hf_zero.save_checkpoint(
                engine, optimizer, tmp_path / delay, background=hf_zero.Snapshots(), step=2
            )
            train_sharded(engine.model, optimizer, comm.rank, device, range(2, 4), clips=True)
            has_gone_on.wait()
            saving.wait()
        return saved

    for delay in delays:
        saved, _ = run_ranks_late(device, partial(play, delay))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / delay)
        for name, param in loaded.named_parameters():
            assert torch.equal(param.detach().float(), saved.weights[name]), f"{name}, {delay} late"
