import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import ranks
from tests.training import Plain, Sharded, loss_of, sgd


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@ranks("num_ranks")
def test_clipping_is_that_of_plain_torch(num_ranks, norm_type):
    batch = models.batch("mlp", seed=dist.get_rank())
    plain = Plain(models.build("mlp"), sgd)
    loss_of(plain(**batch)).backward()
    wanted = plain.clip_grad_norm_(0.01, norm_type)
    clipped = {name: p.grad for name, p in plain.model.named_parameters()}
    for stage in range(4):
        sharded = Sharded(models.build("mlp"), sgd, stage)
        loss_of(sharded(**batch)).backward()
        norm = sharded.clip_grad_norm_(0.01, norm_type)
        assert (norm.dim(), norm.dtype) == (0, torch.float32)
        assert abs(norm - wanted) <= 1e-6 * wanted, f"stage {stage}: {norm}, plain torch {wanted}"
        for name, grad in clipped.items():
            found = hf_zero.ShardedModel(sharded.engine.model).full_grad(name)
            assert torch.allclose(found, grad, rtol=2e-6, atol=1e-9), f"stage {stage}: {name}"
        again = sharded.clip_grad_norm_(float("inf"), norm_type)
        assert abs(again - 0.01) <= 1e-5 * 0.01, f"stage {stage}: {again} after clipping to 0.01"


@ranks(2)
def test_gradients_below_the_bound_are_left_as_they_are():
    sharded = Sharded(models.build("mlp"), sgd, 3)
    loss_of(sharded(**models.batch("mlp", seed=0))).backward()
    name = "blocks.0.linear.weight"
    before = hf_zero.ShardedModel(sharded.engine.model).full_grad(name)
    sharded.clip_grad_norm_(1e6)
    assert torch.equal(hf_zero.ShardedModel(sharded.engine.model).full_grad(name), before)
    sharded.clip_grad_norm_(float("inf"))
    assert torch.equal(hf_zero.ShardedModel(sharded.engine.model).full_grad(name), before)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_ranks_that_clip_unlike_are_refused(stage):
    sharded = Sharded(models.build("mlp"), sgd, stage)
    before = [param.clone() for param in sharded.weights().values()]
    loss_of(sharded(**models.batch("mlp", seed=0))).backward()
    with pytest.raises(LifecycleError, match="use the same arguments on all ranks"):
        sharded.clip_grad_norm_(0.1 * (1 + dist.get_rank()))
    sharded.optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(before, sharded.weights().values()))
    loss_of(sharded(**models.batch("mlp", seed=0))).backward()
    sharded.clip_grad_norm_(0.1)
    sharded.optimizer.step()


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_norm_of_millions_of_elements_is_exact(num_ranks):
    """An fp32 sum loses 1e-5 when 10^6 numbers are added one by one: it must be taken in parts."""
    torch.manual_seed(0)
    values = torch.randn(4 * 10**6)
    for stage in (0, 2, 3):
        model = torch.nn.Linear(values.numel(), 1, bias=False)
        engine = hf_zero.shard(model, stage=stage)
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=0.1)
        model(values.reshape(1, -1)).sum().backward()  # whose gradient is `values` on every rank
        norm = optimizer.clip_grad_norm_(1.0).double()
        error = abs(norm / values.double().norm() - 1).item()
        # chunks of some 10^4 elements: each is off by less than 10^-6, at random, and they are added in fp64
        assert error <= 1e-6, f"stage {stage}: norm {norm}, off by {error:.1e}"


@ranks(2)
def test_clip_grad_value_is_that_of_plain_torch():
    batch = models.batch("mlp", seed=dist.get_rank())
    plain = Plain(models.build("mlp"), sgd)
    loss_of(plain(**batch)).backward()
    plain.clip_grad_value_(0.01)
    for stage in range(4):
        sharded = Sharded(models.build("mlp"), sgd, stage)
        loss_of(sharded(**batch)).backward()
        sharded.clip_grad_value_(0.01)
        for name, p in plain.model.named_parameters():
            found = hf_zero.ShardedModel(sharded.engine.model).full_grad(name)
            assert found.abs().max() <= 0.01
            # the two ranks' summands are added in either order, and halved without rounding: DDP's very bits, but for
            # the order inside of a matmul
            assert torch.allclose(found, p.grad, rtol=1e-6, atol=1e-9), f"stage {stage}: {name}"
