"""Gradients that are not finite are named before a step is taken on them, or the step is left out everywhere."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, NonFiniteError
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.training import Sharded, adamw, loss_of, sgd, train


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient is spoiled at one element."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[0] = ctx.value
        return grad, None


def _spoil(block: nn.Module, value: float, on_rank: int) -> RemovableHandle:
    """From now on this rank's backward meets `value` when it leaves the block."""
    is_here = dist.get_rank() == on_rank
    return block.register_forward_hook(lambda module, args, out: _Spoil.apply(out, value) if is_here else None)


def _backward(subject: Sharded, seed: int) -> None:
    loss_of(subject(**models.batch("mlp", seed=10 * seed + dist.get_rank()))).backward()


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"compute_dtype": torch.bfloat16}, {"shared_memory": False}], ids=str)
@pytest.mark.full("more cases", after=3)
@ranks(2)
def test_a_step_on_gradients_that_are_not_finite_is_refused_by_unit(value, settings):
    for stage in range(4):
        for clips in (True, False):
            model = models.build("mlp")
            subject = Sharded(model, adamw, stage, **settings)
            train(subject, "mlp", num_steps=1)
            before = subject.weights()
            handle = _spoil(model.blocks[1], value, on_rank=1)
            _backward(subject, 7)
            if clips:
                subject.clip_grad_norm_(1.0)
            what = f"stage {stage}, {clips=}"
            reason = "after 1 optimizer steps: the gradient is not finite, first in unit 'blocks.1';"
            with pytest.raises(NonFiniteError, match=reason):
                subject.optimizer.step()
            after = subject.weights()
            assert all(torch.equal(before[name], after[name]) for name in before), what
            # whoever has caught it can go on without that step
            subject.optimizer.zero_grad()
            handle.remove()
            train(subject, "mlp", num_steps=1)


@ranks(1)
def test_one_process_stops_too():
    subject = Sharded(models.build("mlp"), sgd, 3)
    _spoil(subject.model.blocks[-1], float("nan"), on_rank=0)
    _backward(subject, 1)
    with pytest.raises(NonFiniteError, match="first in unit 'blocks.3', where backward begins"):
        subject.optimizer.step()


@ranks(2)
def test_gradients_that_come_after_the_norm_was_measured_are_looked_at():
    """A norm that was measured before the last backward says nothing of it."""
    for stage in (2, 3):
        subject = Sharded(models.build("mlp"), sgd, stage)
        _backward(subject, 1)
        assert subject.clip_grad_norm_(1.0).isfinite()
        _spoil(subject.model.blocks[0], float("nan"), on_rank=0)
        _backward(subject, 2)
        with pytest.raises(NonFiniteError, match="first in unit 'blocks.0'; no step was taken"):
            subject.optimizer.step()


@ranks(2)
def test_an_average_that_overflows_is_refused():
    """Each rank's own gradient is finite, their average is not."""
    model = nn.Linear(4, 1, bias=False)
    subject = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=2), torch.optim.SGD, lr=1.0)
    (model(torch.full((1, 4), 3e38)).sum()).backward()
    with pytest.raises(NonFiniteError, match="the gradient is not finite, first in unit"):
        subject.step()


@pytest.mark.parametrize("settings", [{}, {"offload": "optimizer"}], ids=str)
@ranks(2)
def test_a_step_that_is_skipped_leaves_no_trace(settings):
    for stage in range(4):
        clean = Sharded(models.build("mlp"), adamw, stage, **settings)
        spoiled = Sharded(models.build("mlp"), adamw, stage, nonfinite="skip", **settings)
        for subject in (clean, spoiled):
            train(subject, "mlp", num_steps=2)
        handle = _spoil(spoiled.model.blocks[0], float("nan"), on_rank=1)
        _backward(spoiled, 3)
        spoiled.optimizer.step()
        assert spoiled.optimizer.step_was_skipped and spoiled.optimizer.num_steps == 2
        handle.remove()
        records = [train(subject, "mlp", num_steps=2) for subject in (clean, spoiled)]
        assert not spoiled.optimizer.step_was_skipped
        assert_equal(*records, f"stage {stage}: a step left out, and none")


@ranks(2)
def test_steps_are_taken_on_anything_where_that_is_asked_for():
    subject = Sharded(models.build("mlp"), sgd, 3, nonfinite="ignore")
    _spoil(subject.model.blocks[0], float("nan"), on_rank=1)
    _backward(subject, 1)
    subject.optimizer.step()
    assert any(not weight.isfinite().all() for weight in subject.weights().values())


@pytest.mark.parametrize("offload", ["optimizer", "params"])
@pytest.mark.parametrize("setting", ["stop", "skip"])
@ranks(2)
def test_an_update_in_backward_ends_where_gradients_are_not_finite(setting, offload):
    """Units are updated before the norm is known: the first that is not finite is the last that is looked at."""
    subject = Sharded(models.build("mlp"), adamw, 3, offload=offload, nonfinite=setting)
    train(subject, "mlp", num_steps=1)
    before = subject.weights()
    _spoil(subject.model.blocks[1], float("nan"), on_rank=1)
    with subject.optimizer.in_backward():
        _backward(subject, 1)
    assert subject.optimizer.has_applied_gradients == (setting == "stop")
    if setting == "stop":
        with pytest.raises(NonFiniteError, match="first in unit 'blocks.1'; .* updated in backward"):
            subject.optimizer.step()
        subject.optimizer.zero_grad()
    else:
        subject.optimizer.step()
    after = subject.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(weight.isfinite().all() for weight in after.values())
    assert all(name.startswith(("blocks.2", "blocks.3")) for name in changed), changed
    assert bool(changed) == (setting == "stop")


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="nonfinite: 'skp' is not one of stop, skip, ignore; the nearest is 'skip'"):
        ZeroConfig(nonfinite="skp")
