"""Reads of `param.grad` between backward and step, where hf_zero has none: the first one warns."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.opaque import is_opaque
from hf_zero.errors import LifecycleError
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import build_seeded, sgd


pytestmark = pytest.mark.quick


def _trained(stage: int) -> tuple[nn.Module, hf_zero.ShardedOptimizer]:
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=stage, strict=True)
    return model, hf_zero.ShardedOptimizer(model, sgd(model.parameters()))


@pytest.mark.parametrize("stage", range(4))
def test_the_first_read_warns_with_what_works_and_later_ones_do_not(stage):
    model, optimizer = _trained(stage)
    loss_of(model(inputs(0, 0))).backward()
    with pytest.warns(UserWarning, match=r"param.register_hook\(...\).*sharded.full_grad\(name\)") as caught:
        assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    assert len(caught) == 1 and caught[0].filename == __file__
    optimizer.step()
    loss_of(model(inputs(0, 1))).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(model.parameters()).grad is None


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_that_is_refused_does_not_warn_as_well(stage):
    model, _ = _trained(stage)
    loss_of(model(inputs(0, 0))).backward()
    with warnings.catch_warnings(), pytest.raises(LifecycleError, match="holds parameters of a sharded model"):
        warnings.simplefilter("error")
        sgd(model.parameters()).step()


@pytest.mark.parametrize("goes_directly", [False, pytest.param(True, marks=pytest.mark.direct)])
@pytest.mark.parametrize("stage", range(4))
def test_a_training_that_reads_no_gradient_is_not_warned_and_keeps_its_classes(stage, goes_directly):
    """Where gradients do not go directly, autograd puts them into `.grad`, and the engine itself reads them there."""
    model, optimizer = _trained(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            losses = [loss_of(model(inputs(0, step, salt=salt))) for salt in range(2)]
            for loss in losses:  # two backwards without a forward between them
                loss.backward()
            if stage < 3:
                assert type(copy.deepcopy(model.layers[0].up.weight)) is nn.Parameter
            assert not any(map(is_opaque, model.parameters()))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())  # behind the step
            optimizer.zero_grad()
    with hf_zero.gathered(model):
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert torch.isfinite(model.layers[0].up.weight).all()
