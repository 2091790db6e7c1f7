"""After an exception in forward or backward, the next step equals that of a clean run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.errors import LifecycleError
from tests.distributed import ranks
from tests.engine.models import Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_away,
    assert_equal_weights,
    assert_like_plain_torch,
    assert_same_traffic,
    build_seeded,
    sharded,
    train_reference,
    weights_of,
)
from tests.tiers import more


pytestmark = pytest.mark.direct


class Boom(Exception):
    pass


def _raise(*_):
    raise Boom


class Explosive(Block):
    """Raises on demand: inside its forward, or when the gradient comes to its middle."""

    when = None

    def forward(self, hidden):
        if self.when == "forward":
            raise Boom
        middle = torch.tanh(self.up(self.norm(hidden)))
        if self.when == "backward" and middle.requires_grad:
            middle.register_hook(_raise)
        return hidden + self.down(middle)


class ExplosiveTower(Tower):
    use_checkpoint = None

    def __init__(self):
        super().__init__(4, block=Explosive)

    def forward(self, x):
        if self.use_checkpoint is None:
            return super().forward(x)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_checkpoint)
        return self.head(hidden)


def fail_in_forward(model, rank, layer=2):
    model.layers[layer].when = "forward"
    with pytest.raises(Boom):
        model(inputs(rank, 77))
    model.layers[layer].when = None


def fail_in_evaluation(model, rank):
    with torch.no_grad():
        fail_in_forward(model, rank, layer=1)


def fail_in_backward(model, rank, layer=1):
    model.layers[layer].when = "backward"
    loss = loss_of(model(inputs(rank, 77)))
    with pytest.raises(Boom):
        loss.backward()
    model.layers[layer].when = None


def fail_in_the_last_backward(model, rank):
    fail_in_backward(model, rank, layer=3)


def fail_between(model, rank):
    """Out of memory in the loss, say: a forward whose backward never starts."""
    model(inputs(rank, 77))
    model(inputs(rank, 78))


def fail_in_a_module_of_the_root(model, rank):
    handle = model.head.register_forward_hook(_raise)
    with pytest.raises(Boom):
        model(inputs(rank, 77))
    handle.remove()


def fail_in_a_wrong_shape(model, rank):
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))


def fail_twice(model, rank):
    fail_in_backward(model, rank)
    fail_in_forward(model, rank)
    fail_in_the_last_backward(model, rank)


FAILURES = [fail_in_forward, fail_in_evaluation, fail_in_backward, fail_in_the_last_backward, fail_between]
FAILURES += [fail_in_a_module_of_the_root, fail_in_a_wrong_shape, fail_twice]


@pytest.mark.parametrize(
    "use_checkpoint, stages", [(None, ALL_STAGES), (False, (3,)), *more((False, (0, 1, 2)), (True, ALL_STAGES))]
)
@ranks(2)
def test_the_step_after_a_failure_equals_that_of_a_clean_run(use_checkpoint, stages):
    def build():
        model = ExplosiveTower()
        model.use_checkpoint = use_checkpoint
        return model

    _, wanted = train_reference(build, one_backward, num_steps=2)
    for stage in stages:
        for fail in FAILURES:
            model, engine, optimizer = sharded(build, stage)
            rank = dist.get_rank()
            one_backward(model, rank, 0)
            optimizer.step()
            fail(model, rank)
            optimizer.zero_grad()  # what the failed backward collected is not wanted
            one_backward(model, rank, 1)
            optimizer.step()
            assert_away(model, engine)
            assert_same_traffic(engine)
            assert_equal_weights(weights_of(model), wanted, f"stage {stage} after {fail.__name__}")


@pytest.mark.quick
@ranks(2)
def test_parameters_are_whole_after_a_failure():
    """The parameters can be read and written at once after a failure."""
    for stage in ALL_STAGES:
        for fail in FAILURES:
            model = build_seeded(ExplosiveTower)
            wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
            hf_zero.shard(model, stage=stage, **SETTINGS)
            fail(model, dist.get_rank())
            assert_equal_weights(weights_of(model), wanted, f"stage {stage} after {fail.__name__}", exact=True)


@ranks(2)
def test_a_backward_that_fails_on_all_ranks_is_in_no_step():
    """Neither where the loop catches the error and steps all the same, nor where another backward comes first."""
    for stage in (2, 3):
        for num_backwards in (0, 1):
            _, wanted = train_reference(ExplosiveTower, one_backward, num_steps=num_backwards)
            model, _, optimizer = sharded(ExplosiveTower, stage)
            fail_in_backward(model, dist.get_rank())
            for step in range(num_backwards):
                one_backward(model, dist.get_rank(), step)
            optimizer.step()
            what = f"stage {stage}, {num_backwards} backwards"
            assert_equal_weights(weights_of(model), wanted, what, exact=not num_backwards)


class ReturnsNone(nn.Module):
    """A model that is called while an exception is handled, and returns nothing: that is no failure."""

    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.output = None

    def forward(self, x):
        self.output = self.tower(x)


@ranks(2)
def test_a_model_may_be_called_in_an_exception_handler():
    def act(model, rank, step):
        try:
            raise Boom
        except Boom:
            model(inputs(rank, step))
        loss = loss_of(model.output)
        loss.backward()
        return [loss.detach()]

    assert_like_plain_torch(ReturnsNone, act)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_a_gradient_that_comes_after_its_unit_was_reduced_is_not_lost_in_silence(stage):
    """As when something keeps a gradient back that the engine had no reason to wait for."""
    model, engine, _ = sharded(Tower, stage)
    unit = engine.blocks[2]

    def come_late(grad):
        assert not unit.is_unsharded or stage == 2
        gradient = unit.gradients[0]
        unit.lend_gradients()
        gradient.receive(0, torch.ones_like(gradient.views[0]))
        return grad

    model.layers[0].up.bias.register_hook(come_late)
    with pytest.raises(LifecycleError, match="unit 'layers.2': a gradient came after its gradients were reduced"):
        loss_of(model(inputs(dist.get_rank(), 0))).backward()


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_a_kept_graph_is_not_run_again_in_one_loss_with_another(stage):
    model, _, _ = sharded(Tower, stage)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    first = loss_of(model(x))
    torch.autograd.grad(first, x, retain_graph=True)
    second = loss_of(model(inputs(dist.get_rank(), 1)))
    with pytest.raises(LifecycleError, match=r"were reduced; a graph kept by a backward \(retain_graph=True\)"):
        (first + second).backward()
