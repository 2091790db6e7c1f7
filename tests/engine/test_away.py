"""Uses of parameters outside of the forward that has them whole: exact, or refused with the parameter's name."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.engine.away import AwayParameter
from hf_zero.errors import LifecycleError, NonFiniteError
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, one_backward
from tests.engine.reference import (
    SETTINGS,
    assert_equal_weights,
    assert_like_plain_torch,
    build_seeded,
    sharded,
    weights_of,
)


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


@pytest.mark.parametrize("build", [TiedAfter, BorrowedModule])
@ranks(2)
def test_what_a_module_outside_of_the_blocks_has_too_is_whole_there(build):
    assert_like_plain_torch(build, one_backward)


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


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", USES)
@ranks(2)
def test_a_functional_use_outside_of_the_block_is_refused_by_name(name):
    x = inputs(dist.get_rank(), 0)
    model, engine, optimizer = sharded(lambda: Functional(USES[name]), 3)
    for _ in range(2):
        with pytest.raises(LifecycleError, match=r"^layers\.[02]\.(norm|up)\.weight: is used \("):
            model(x)
    model.use = lambda _model, hidden: hidden
    one_backward(model, dist.get_rank(), 0)
    optimizer.step()
    found = weights_of(model)

    model, _, optimizer = sharded(lambda: Functional(lambda _model, hidden: hidden), 3)
    one_backward(model, dist.get_rank(), 0)
    optimizer.step()
    assert_equal_weights(found, weights_of(model), "after the refusal", exact=True)


@ranks(2)
def test_no_step_is_taken_on_a_functional_use_behind_the_block():
    """Until the next block begins, a block's parameters can be read, for hooks on it. In backward they are NaN."""
    model, _, optimizer = sharded(
        lambda: Functional(lambda model, hidden: hidden * model.layers[2].norm.weight.pow(2)), 3
    )
    wanted = weights_of(model)
    one_backward(model, dist.get_rank(), 0)
    with pytest.raises(NonFiniteError, match="parameter that is used outside of the block after its forward"):
        optimizer.step()
    assert_equal_weights(weights_of(model), wanted, "after the refusal", exact=True)


@ranks(2)
def test_a_first_forward_in_inference_mode():
    """There, giving a parameter its data is an operation like any other."""
    model = build_seeded(Tower)
    with torch.no_grad():
        wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, **SETTINGS)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs(0, 0)), wanted)


@ranks(2)
def test_shapes_and_dtypes_of_parameters_that_are_away_may_be_looked_at():
    """Looking at shapes, dtypes and devices reads no value."""

    def use(model, hidden):
        weight = first(model)
        like = torch.zeros_like(weight) + weight.new_ones(weight.shape)
        return hidden.to(weight.dtype).view(-1, weight.numel()).to(weight.device) * like

    assert_like_plain_torch(lambda: Functional(use), one_backward)


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


@ranks(2)
def test_a_subclass_of_parameter_keeps_its_class_and_attributes():
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
