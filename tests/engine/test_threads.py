"""Forwards of two threads, and those that break off: what has ended is not counted as under way."""

import threading

import pytest
import torch

import hf_zero
from hf_zero.engine import engine as engine_module
from hf_zero.engine import engine_of
from hf_zero.errors import LifecycleError
from tests.engine.models import WIDTH, Tower, inputs, loss_of
from tests.engine.reference import build_seeded, sgd


pytestmark = pytest.mark.quick


def _in_a_thread(model, given) -> Exception | None:
    """Calls a model by another thread, and returns what that raised."""
    raised: list = [None]

    def call():
        try:
            model(given)
        except Exception as error:
            raised[0] = error

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return raised[0]


def _in_the_midst(model, act) -> None:
    """Has `act` called once within the next forward."""

    def run(*_):
        handle.remove()
        act()

    handle = model.layers[1].register_forward_hook(run)


def test_a_second_thread_is_refused_and_leaves_the_first_alone():
    model, refused = build_seeded(Tower), []
    wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, strict=True)
    _in_the_midst(model, lambda: refused.append(_in_a_thread(model, inputs(0, 1))))
    assert torch.equal(model(inputs(0, 0)), wanted)
    assert isinstance(refused[0], LifecycleError) and "called by two threads at a time" in str(refused[0])
    assert _in_a_thread(model, inputs(0, 1)) is None  # alone


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_fails_on_a_second_thread_has_ended(stage):
    model, raised = build_seeded(Tower), []
    engine = engine_of(hf_zero.shard(model, stage=stage, strict=True))
    _in_the_midst(model, lambda: raised.append(_in_a_thread(model, torch.randn(2, WIDTH + 1))))
    with hf_zero.gathered(model):
        model(inputs(0, 0))
    assert "shape" in str(raised[0])
    assert engine._forward.depth == 0
    assert _in_a_thread(model, inputs(0, 1)) is None


@pytest.mark.parametrize("is_step", [True, False])
def test_a_forward_that_a_keyboard_interrupt_broke_off_has_ended(is_step):
    model = build_seeded(Tower)
    wanted = model(inputs(0, 0))
    engine = engine_of(hf_zero.shard(model, stage=3, strict=True))
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))

    def interrupt():
        raise KeyboardInterrupt

    _in_the_midst(model, interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(0, 0))
    optimizer.step() if is_step else optimizer.zero_grad()
    assert engine._forward.depth == 0
    assert not any(unit.is_unsharded for unit in engine.units)
    assert _in_a_thread(model, inputs(0, 1)) is None
    assert torch.equal(model(inputs(0, 0)), wanted)


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
