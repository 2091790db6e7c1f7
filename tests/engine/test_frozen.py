"""Parameters that do not train, beside or instead of those that do, and parameters that no batch reaches."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_like_plain_torch,
    build_seeded,
    sgd,
    train_sharded,
    weights_of,
)


pytestmark = pytest.mark.direct


# Which parameters train, by their names.
TRAINED = {
    "all but a unit": lambda name: not name.startswith("layers.1."),
    "one bias of a unit": lambda name: not name.startswith("layers.1.") or name == "layers.1.up.bias",
    "one bias": lambda name: name == "layers.2.down.bias",
    "the first bias": lambda name: name == "layers.0.norm.bias",
    "the head": lambda name: name.startswith("head."),
    "the blocks": lambda name: name.startswith("layers."),
}


def partly(trained: str) -> Tower:
    model = Tower()
    for name, param in model.named_parameters():
        param.requires_grad_(TRAINED[trained](name))
    return model


class LowRank(nn.Module):
    """A frozen block with a trainable low-rank addition, as LoRA has."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.base = Block(width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width) * 0.3)
        self.b = nn.Parameter(torch.randn(width, 2) * 0.3)

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.a.t() @ self.b.t()


def low_rank() -> Tower:
    model = Tower(4, block=LowRank)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


BUILDERS = {**{name: partial(partly, name) for name in TRAINED}, "low rank": low_rank}


@pytest.mark.full("more cases", after=3)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", BUILDERS)
@ranks(2)
def test_partly_frozen_models_train_as_in_plain_torch(name):
    assert_like_plain_torch(BUILDERS[name], one_backward, num_steps=3)


@ranks(2)
def test_gradients_of_the_inputs_are_those_of_plain_torch():
    def act(model, rank, step):
        x = inputs(rank, step).requires_grad_()
        loss = loss_of(model(x))
        loss.backward()
        return [loss.detach(), x.grad.abs().sum(), x.grad[0, 0]]

    for build in (Tower, BUILDERS["the head"], low_rank):
        assert_like_plain_torch(build, act)


@ranks(2)
def test_a_wholly_frozen_model_gives_the_gradients_of_its_inputs():
    for stage in ALL_STAGES:
        model = build_seeded(Tower).requires_grad_(False)
        x = inputs(0, 0).requires_grad_()
        wanted_output = model(x)
        (wanted,) = torch.autograd.grad(loss_of(wanted_output), x)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        for _ in range(2):
            x.grad = None
            loss_of(model(x)).backward()
            torch.testing.assert_close(x.grad, wanted)


class SometimesUsed(Tower):
    """The side block serves only some steps, and on some ranks."""

    def __init__(self):
        super().__init__(3)
        self.side = nn.Linear(WIDTH, 2)
        self.use_side = False

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) + (self.side(hidden) if self.use_side else 0)


def adamw(params):
    # eps far above rounding keeps the update smooth where gradients are nearly zero
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)


@ranks(2)
def test_parameters_used_now_and_then_are_left_alone_in_between():
    def act(model, rank, step):
        model.use_side = step == 1 or (step == 3 and rank == 0)
        model.order = []
        return one_backward(model, rank, step)

    for make_optimizer in (sgd, adamw):
        assert_like_plain_torch(SometimesUsed, act, num_steps=5, make_optimizer=make_optimizer)


@ranks(2)
def test_blocks_that_no_rank_calls_are_not_decayed():
    """Other blocks at every step, so that each parameter has a step count of its own."""

    def act(model, rank, step):
        model.order = [[0, 1], [1, 2, 3], [0, 3], [2]][step]
        return one_backward(model, rank, step)

    assert_like_plain_torch(Tower, act, num_steps=4, make_optimizer=adamw)


@ranks(2)
def test_a_step_without_gradients_changes_nothing():
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        engine = hf_zero.shard(model, stage=stage, **SETTINGS)
        optimizer = hf_zero.ShardedOptimizer(engine, adamw(model.parameters()))
        before = weights_of(model)
        optimizer.step()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert float(norm) == 0.0
        after = weights_of(model)
        assert all(torch.equal(before[name], after[name]) for name in before), f"stage {stage}: an empty step changed"
        assert not optimizer.state or all(not state for state in optimizer.state.values())
        # a real step afterwards is a first step
        one_backward(model, dist.get_rank(), 0)
        optimizer.step()
        trained = weights_of(model)
        reference = build_seeded(Tower)
        plain = adamw(reference.parameters())
        for rank in range(2):
            one_backward(reference, rank, 0)
        for p in reference.parameters():
            p.grad /= 2
        plain.step()
        for name, p in reference.named_parameters():
            torch.testing.assert_close(trained[name], p.detach(), rtol=2e-5, atol=2e-6)


@ranks(2)
def test_a_parameter_unfrozen_after_sharding_is_refused_at_the_step():
    for stage in ALL_STAGES:
        model = build_seeded(BUILDERS["all but a unit"])
        engine = hf_zero.shard(model, stage=stage, **SETTINGS)
        optimizer = hf_zero.ShardedOptimizer(engine, sgd([p for p in model.parameters() if p.requires_grad]))
        model.layers[1].requires_grad_(True)
        one_backward(model, dist.get_rank(), 0)
        with pytest.raises(hf_zero.errors.LifecycleError, match="unfrozen"):
            optimizer.step()


@ranks(2)
def test_a_parameter_frozen_after_sharding_stays_as_it_is():
    def act(model, rank, step):
        if step == 1:
            model.layers[1].requires_grad_(False)
            model.layers[3].up.bias.requires_grad_(False)
        return one_backward(model, rank, step)

    assert_like_plain_torch(Tower, act, num_steps=3)


@dataclass
class Hidden:
    """What a block hands on, beside tensors, lists and dicts of them."""

    values: torch.Tensor
    owner: "Hidden | None" = None

    def __post_init__(self):
        self.owner = self  # as a cache that knows who holds it


class Plain(nn.Module):
    """A block without a norm: a norm's backward would read its weight, and find NaN."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Wrapping(Plain):
    """One that hands on a dataclass, and is given one."""

    def forward(self, hidden):
        return Hidden(super().forward(hidden.values if isinstance(hidden, Hidden) else hidden))


class Unwrapping(Tower):
    def __init__(self):
        super().__init__(block=Wrapping)
        self.layers.requires_grad_(False)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.values)


@ranks(2)
def test_gradients_through_frozen_blocks_are_right_or_refused():
    """Nothing of frozen blocks arrives in a backward that the engine could look at."""
    assert_like_plain_torch(Unwrapping, one_backward)

    def build():
        model = Tower(block=Plain)
        model.layers.requires_grad_(False)
        return model

    def act(model, rank, step):  # a loss on what a hook has taken from inside the first block, and on nothing else
        taken = []
        handle = model.layers[0].up.register_forward_hook(lambda _m, _args, output: taken.append(output))
        model(inputs(rank, step))
        handle.remove()
        loss = loss_of(taken[0])
        loss.backward()
        return [loss.detach()]

    assert_like_plain_torch(build, act, stages=(0, 1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # another block's values lie there
        train_sharded(build, act, 3, shared_memory=False)


# gloo's collectives know none of them, NCCL's know float8 alone
UNSENT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.bool, torch.complex64)


class Coded(nn.Module):
    """A block over frozen codes in dtypes that are not computed in; a buffer too."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.inner = Block(width)
        for index, dtype in enumerate(UNSENT):
            codes = torch.randint(0, 2, (width, width)).to(dtype)
            self.register_parameter(f"codes_{index}", nn.Parameter(codes, requires_grad=False))
        self.register_buffer("scale", torch.rand(()).to(torch.float8_e4m3fn))

    def forward(self, hidden):
        for index, dtype in enumerate(UNSENT):
            codes = getattr(self, f"codes_{index}")
            codes = (torch.view_as_real(codes)[..., 0] if dtype.is_complex else codes).float()
            hidden = hidden + 0.1 * self.scale.float() * hidden @ codes
        return self.inner(hidden)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.support("Frozen parameters in other dtypes than the compute dtype", area="Precision", stages=ALL_STAGES)
@pytest.mark.parametrize("shared_memory", [True, False])
@ranks(2)
def test_frozen_parameters_may_be_of_dtypes_that_are_not_sent_as_numbers(shared_memory):
    reference = build_seeded(lambda: Tower(2, block=Coded))
    wanted = {name: p.detach().clone() for name, p in reference.named_parameters()}
    losses = [loss_of(reference(inputs(rank, 0))).detach() for rank in range(2)]
    for stage in ALL_STAGES:
        torch.manual_seed(dist.get_rank())  # rank 0's values are everyone's
        model = Tower(2, block=Coded) if dist.get_rank() else build_seeded(lambda: Tower(2, block=Coded))
        hf_zero.shard(model, stage=stage, shared_memory=shared_memory, **SETTINGS)
        (loss,) = one_backward(model, dist.get_rank(), 0)
        torch.testing.assert_close(loss, losses[dist.get_rank()], msg=f"stage {stage}")
        with hf_zero.gathered(model):
            for name, p in model.named_parameters():
                assert p.dtype is wanted[name].dtype
                assert torch.equal(_bytes(p), _bytes(wanted[name])), f"stage {stage}: {name}"
