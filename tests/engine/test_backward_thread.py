"""Backward on another Python thread than forward computes the same bits. On a GPU, autograd runs hooks on a thread of
the device: here another thread stands in for it."""

import threading
from collections.abc import Callable

import pytest
import torch

import hf_zero
from hf_zero.activation import offload
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.tiny_training import make_inner, random_batch, tiny_llama


@pytest.fixture(autouse=True)
def _moves_all(monkeypatch):
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)


CPU = torch.device("cpu")
BF16 = torch.bfloat16
# By name: settings of `shard`, the kind of checkpointing, and whether forward runs under autocast.
CASES = {
    "stage 0": (dict(stage=0), "", False),
    "stage 1": (dict(stage=1), "", False),
    "stage 2": (dict(stage=2), "", False),
    "stage 3": (dict(stage=3), "", False),
    "bf16": (dict(stage=3, compute_dtype=BF16), "", False),
    "autocast": (dict(stage=3), "", True),
    "checkpointing": (dict(stage=3), "plain", False),
    "reentrant checkpointing, autocast": (dict(stage=3), "reentrant", True),
    "parameters on the host": (dict(stage=3, offload="params"), "", False),
    "activations on the host": (dict(stage=3, offload_activations=True), "plain", False),
    "MLPs in tiles": (dict(stage=3, tiled_mlp=2), "", False),
    "chunked loss": (dict(stage=3, chunked_loss="on"), "", False),
}


def _in_thread(act: Callable[[], None]) -> None:
    failures = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def _train(settings: dict, checkpointing: str, casts: bool, run: Callable) -> list[torch.Tensor]:
    model = tiny_llama(0)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    hf_zero.shard(model, strict=True, **settings)
    optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
    losses = []
    for step in range(2):
        with torch.autocast("cpu", BF16, enabled=casts):
            loss = model(**random_batch(0, step, CPU)).loss
        run(loss.backward)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with hf_zero.gathered(model):
        return [torch.stack(losses), *(param.detach().clone() for param in model.parameters())]


@pytest.mark.full("more cases", after=5)
@pytest.mark.parametrize("name", CASES)
def test_backward_on_another_thread_computes_the_same_bits(name):
    here = _train(*CASES[name], lambda backward: backward())
    there = _train(*CASES[name], _in_thread)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
