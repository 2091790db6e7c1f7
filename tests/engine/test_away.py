"""Uses of parameters outside of the forward that has them whole: exact, or refused with the parameter's name."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.engine.away import AwayParameter
from hf_zero.errors import LifecycleError, NonFiniteError
from tests.distributed import run_ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of
from tests.engine.reference import SETTINGS, assert_equal_weights, assert_stages_match, build_seeded, sgd, weights_of


LIMIT = 60.0


def one_backward(model, rank, step):
    loss = loss_of(model(inputs(rank, step)))
    loss.backward()
    return [loss.detach()]


# A module outside of the blocks that has what a block has


class TiedAfter(Tower):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 2 * WIDTH)
        self.out.weight = self.layers[1].up.weight

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


class BorrowedModule(Tower):
    def __init__(self):
        super().__init__()
        self.again = self.layers[1].down

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.again(F.gelu(torch.cat([hidden, hidden], dim=-1))))


def _registered_outside(build):
    assert_stages_match(build, one_backward)


@pytest.mark.parametrize("build", [TiedAfter, BorrowedModule])
def test_what_a_module_outside_of_the_blocks_has_too_is_whole_there(build):
    run_ranks(_registered_outside, 2, build, timeout=LIMIT)


# Functional uses


class Functional(Tower):
    """`use` is what its forward does with the hidden state and the parameters of blocks."""

    def __init__(self, use):
        super().__init__(4)
        self.use = use

    def forward(self, x):
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index == 2:
                hidden = self.use(self, hidden)
        return self.head(hidden)


def first(model) -> nn.Parameter:
    return model.layers[0].norm.weight


def _counted(model, hidden):
    with torch.no_grad():
        return hidden * (1 + (first(model) > 0.5).sum())


USES = {
    "linear": lambda model, hidden: hidden + F.linear(hidden, model.layers[0].up.weight)[..., :WIDTH],
    "product": lambda model, hidden: hidden * first(model),
    "sum": lambda model, hidden: hidden + first(model),
    "flattened": lambda model, hidden: hidden + torch.cat([first(model).view(-1)]).norm(),
    "without gradients": _counted,
    "item": lambda model, hidden: hidden * float(first(model)[0] > 0.5),
}


def _functional(name):
    x = inputs(dist.get_rank(), 0)
    model = build_seeded(lambda: Functional(USES[name]))
    engine = hf_zero.shard(model, stage=3, **SETTINGS)
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    for _ in range(2):
        with pytest.raises(LifecycleError, match=r"^layers\.[02]\.(norm|up)\.weight: is used \("):
            model(x)
    model.use = lambda _model, hidden: hidden
    one_backward(model, dist.get_rank(), 0)
    optimizer.step()
    found = weights_of(model)

    model = build_seeded(lambda: Functional(lambda _model, hidden: hidden))
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=3, **SETTINGS), sgd(model.parameters()))
    one_backward(model, dist.get_rank(), 0)
    optimizer.step()
    assert_equal_weights(found, weights_of(model), "after the refusal", exact=True)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", USES)
def test_a_functional_use_outside_of_the_block_is_refused_by_name(name):
    run_ranks(_functional, 2, name, timeout=LIMIT)


def _of_the_last_block():
    """Until the next block begins, a block's parameters can be read, for hooks on it. In backward they are NaN."""
    model = build_seeded(lambda: Functional(lambda model, hidden: hidden * model.layers[2].norm.weight.pow(2)))
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=3, **SETTINGS), sgd(model.parameters()))
    wanted = weights_of(model)
    one_backward(model, dist.get_rank(), 0)
    with pytest.raises(NonFiniteError, match="parameter that is used outside of the block after its forward"):
        optimizer.step()
    assert_equal_weights(weights_of(model), wanted, "after the refusal", exact=True)


def test_no_step_is_taken_on_a_functional_use_behind_the_block():
    run_ranks(_of_the_last_block, 2, timeout=LIMIT)


def _in_evaluation():
    model = build_seeded(lambda: Functional(lambda _model, hidden: hidden))
    hf_zero.shard(model, stage=3, **SETTINGS)
    one_backward(model, dist.get_rank(), 0)
    model.use = USES["sum"]
    with torch.no_grad(), pytest.raises(LifecycleError, match="^layers.0.norm.weight: is used"):
        model(inputs(0, 0))


def test_a_functional_use_in_evaluation_alone_is_refused_too():
    run_ranks(_in_evaluation, 2, timeout=LIMIT)


def _in_inference_mode():
    """There, giving a parameter its data is an operation like any other."""
    model = build_seeded(Tower)
    with torch.no_grad():
        wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, **SETTINGS)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs(0, 0)), wanted)


def test_a_first_forward_in_inference_mode():
    run_ranks(_in_inference_mode, 2, timeout=LIMIT)


def _about_shape():
    """Looking at shapes, dtypes and devices reads no value."""

    def use(model, hidden):
        weight = first(model)
        like = torch.zeros_like(weight) + weight.new_ones(weight.shape)
        return hidden.to(weight.dtype).view(-1, weight.numel()).to(weight.device) * like

    assert_stages_match(lambda: Functional(use), one_backward)


def test_shapes_and_dtypes_of_parameters_that_are_away_may_be_looked_at():
    run_ranks(_about_shape, 2, timeout=LIMIT)


# Losses


def _squares(weight):
    return weight.pow(2).sum()


def _absolutes(weight):
    return weight.abs().sum()


def _largest(weight):
    return weight.detach().clamp(max=1.0).sum()


def _penalty(penalty):
    model = build_seeded(Tower)
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=3, **SETTINGS), sgd(model.parameters()))
    for step in range(2):  # the same in every step
        loss = loss_of(model(inputs(dist.get_rank(), step)))
        with pytest.raises(LifecycleError, match=r"^layers\.\d\.\w+\.\w+: is used \("):
            loss + sum(penalty(p) for p in model.parameters())
        loss.backward()
        optimizer.step()
        with pytest.raises(LifecycleError, match=r"^embed\.weight: is used \("):
            penalty(model.embed.weight)


@pytest.mark.parametrize("penalty", [_squares, _absolutes, _largest])
def test_a_loss_that_uses_parameters_that_are_away_is_refused_by_name(penalty):
    run_ranks(_penalty, 2, penalty, timeout=LIMIT)


def _penalty_inside():
    def act(model, rank, step):
        with hf_zero.gathered(model):
            loss = loss_of(model(inputs(rank, step))) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()
        return [loss.detach()]

    assert_stages_match(Tower, act)


def test_a_penalty_inside_gathered_is_exact():
    run_ranks(_penalty_inside, 2, timeout=LIMIT)


# Between steps


def _average_by_hand():
    """An average of the weights, as scripts and callbacks keep it: NaN or old values would not show for long."""
    model = build_seeded(Tower)
    average = [torch.zeros(p.shape) for p in model.parameters()]
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=3, **SETTINGS), sgd(model.parameters()))
    for step in range(2):
        one_backward(model, dist.get_rank(), step)
        optimizer.step()
        optimizer.zero_grad()
        for update in (_lerp, _torch_ema, _foreach):
            with torch.no_grad(), pytest.raises(LifecycleError, match=r"^embed\.weight: is used .*named_shards"):
                update(average, list(model.parameters()))
    assert not any(mean.any() for mean in average)


def _lerp(average, params):
    for mean, p in zip(average, params):
        mean.lerp_(p, 0.1)


def _torch_ema(average, params):
    for mean, p in zip(average, params):
        mean.sub_((mean - p).mul_(0.1))


def _foreach(average, params):
    torch._foreach_mul_(average, 0.9)
    torch._foreach_add_(average, params, alpha=0.1)


def test_an_average_of_the_weights_by_hand_is_refused_by_name():
    run_ranks(_average_by_hand, 2, timeout=LIMIT)


def _before_any_forward():
    """A method of the model that reads a parameter of the root before any of its modules was called."""

    class Tied(Tower):
        def logits(self, hidden):
            return hidden @ self.head.weight.t()

    model = build_seeded(Tied)
    hf_zero.shard(model, stage=3, **SETTINGS)
    with pytest.raises(LifecycleError, match=r"^head\.weight: is used .*hf_zero\.gathered"):
        model.logits(torch.ones(1, WIDTH))
    with hf_zero.gathered(model.head):
        assert model.logits(torch.ones(1, WIDTH)).isfinite().all()


def test_a_method_that_reads_a_parameter_before_any_module_was_called_is_refused_by_name():
    run_ranks(_before_any_forward, 2, timeout=LIMIT)


class Own(nn.Parameter):
    """A subclass of Parameter with attributes, as quantizers have them."""


class WithOwn(Block):
    def __init__(self, width: int = WIDTH):
        super().__init__(width)
        self.scale = Own(torch.full((width,), 0.7), requires_grad=False)
        self.scale.codes = torch.ones(3)

    def forward(self, hidden):
        assert type(self.scale) is Own
        return super().forward(hidden) * self.scale


def _subclasses():
    model = build_seeded(lambda: Tower(block=WithOwn))
    wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, **SETTINGS)
    torch.testing.assert_close(model(inputs(0, 0)), wanted)
    for layer in model.layers:
        assert isinstance(layer.scale, Own) and isinstance(layer.scale, AwayParameter)
        assert type(layer.scale).__name__ == "Own" and layer.scale.codes.sum() == 3
        with pytest.raises(LifecycleError, match=r"^layers\.\d\.scale: is used"):
            layer.scale.sum()
    with hf_zero.gathered(model):
        assert all(type(layer.scale) is Own for layer in model.layers)
    hf_zero.ShardedModel(model).unshard()
    assert all(type(layer.scale) is Own for layer in model.layers)


def test_a_subclass_of_parameter_keeps_its_class_and_attributes():
    run_ranks(_subclasses, 2, timeout=LIMIT)
