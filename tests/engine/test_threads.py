"""Forwards and backwards of several threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_zero
from hf_zero.activation import offload
from hf_zero.engine import engine as engine_module
from hf_zero.engine import engine_of
from hf_zero.errors import LifecycleError
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import make_inner, random_batch, tiny_llama
from tests.engine.models import WIDTH, Tower, inputs, loss_of
from tests.engine.reference import build_seeded


def _in_a_thread(act: Callable[[], object]) -> BaseException | None:
    """Calls a function by another thread, and returns what that raised."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(act).exception()


def _in_the_midst(model, act) -> None:
    """Has `act` called once within the next forward."""

    def run(*_):
        handle.remove()
        act()

    handle = model.layers[1].register_forward_hook(run)


@pytest.mark.quick
def test_a_second_thread_is_refused_and_leaves_the_first_alone():
    model, refused = build_seeded(Tower), []
    wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, strict=True)
    _in_the_midst(model, lambda: refused.append(_in_a_thread(lambda: model(inputs(0, 1)))))
    assert torch.equal(model(inputs(0, 0)), wanted)
    assert isinstance(refused[0], LifecycleError) and "called by two threads at a time" in str(refused[0])
    assert _in_a_thread(lambda: model(inputs(0, 1))) is None  # alone


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_fails_on_a_second_thread_has_ended(stage):
    model, raised = build_seeded(Tower), []
    hf_zero.shard(model, stage=stage, strict=True)
    _in_the_midst(model, lambda: raised.append(_in_a_thread(lambda: model(torch.randn(2, WIDTH + 1)))))
    with hf_zero.gathered(model):
        model(inputs(0, 0))
    assert "shape" in str(raised[0])
    assert _in_a_thread(lambda: model(inputs(0, 1))) is None


def test_backwards_of_two_threads_begin_at_the_same_time():
    """So do those of models on several devices: autograd has a thread for each."""
    models = [build_seeded(Tower) for _ in range(2)]
    for model in models:
        hf_zero.shard(model, stage=3, strict=True)
    losses = [loss_of(model(inputs(0, 0))) for model in models]
    second = threading.Thread(target=losses[1].backward)

    class Meanwhile:
        """Stands among the backwards under way; the second one begins while the first looks at them."""

        @property
        def _task(self) -> None:
            if second.ident is None:
                second.start()
                second.join(0.5)

    meanwhile = Meanwhile()
    engine_module._passes.add(meanwhile)
    losses[0].backward()
    second.join()
    for model in models:
        assert all(gradient.is_reduced for gradient in engine_of(model).gradients)


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


def _train(settings: dict, checkpointing: str, casts: bool, run: Callable) -> list[torch.Tensor]:
    model = tiny_llama()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    hf_zero.shard(model, strict=True, **settings)
    optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
    losses = []
    for step in range(2):
        with torch.autocast("cpu", BF16, enabled=casts):
            loss = model(**random_batch(0, step, CPU)).loss
        assert run(loss.backward) is None
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with hf_zero.gathered(model):
        return [torch.stack(losses), *(param.detach().clone() for param in model.parameters())]


@pytest.mark.full("more cases", after=5)
@pytest.mark.parametrize("name", CASES)
def test_backward_on_another_thread_computes_the_same_bits(name, monkeypatch):
    """On a GPU, autograd runs hooks on a thread of the device: here another thread stands in for it."""
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)
    here = _train(*CASES[name], lambda backward: backward())
    there = _train(*CASES[name], _in_a_thread)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
