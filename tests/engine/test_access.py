"""Models that are not called as one: parts on their own, blocks by hand, towers in any order, the loss outside."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_exact_or_refused,
    assert_like_plain_torch,
    build_seeded,
    sharded,
)


def blocks_by_hand(model, rank, step):
    hidden = model.embed(inputs(rank, step))
    for block in model.layers:
        hidden = block(hidden)
    loss = loss_of(model.head(hidden))
    loss.backward()
    return [loss.detach()]


def blocks_alone(model, rank, step):
    """No module of the root is called at all."""
    hidden = inputs(rank, step, shape=(5, WIDTH))
    for block in model.layers:
        hidden = block(hidden)
    loss = loss_of(hidden)
    loss.backward()
    return [loss.detach()]


def one_block_alone(model, rank, step):
    loss = loss_of(model.layers[2](inputs(rank, step, shape=(5, WIDTH))))
    loss.backward()
    return [loss.detach()]


def some_blocks_then_the_model(model, rank, step):
    hidden = inputs(rank, step, shape=(5, WIDTH))
    for block in model.layers[:2]:
        hidden = block(hidden)
    loss = loss_of(hidden) + loss_of(model(inputs(rank, step)))
    loss.backward()
    return [loss.detach()]


def embedding_alone(model, rank, step):
    loss = loss_of(model.embed(inputs(rank, step)))
    loss.backward()
    return [loss.detach()]


def early_exit(model, rank, step):
    """A loss after two of four blocks, and one at the end."""
    hidden = model.embed(inputs(rank, step))
    for block in model.layers[:2]:
        hidden = block(hidden)
    early = loss_of(model.head(hidden))
    for block in model.layers[2:]:
        hidden = block(hidden)
    late = loss_of(model.head(hidden))
    (early + late).backward()
    return [early.detach(), late.detach()]


def forward_method(model, rank, step):
    """`model.forward(...)`, past the hooks of the outermost module."""
    loss = loss_of(model.forward(inputs(rank, step)))
    loss.backward()
    return [loss.detach()]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "act",
    [
        blocks_by_hand,
        blocks_alone,
        one_block_alone,
        some_blocks_then_the_model,
        embedding_alone,
        early_exit,
        forward_method,
    ],
)
@ranks(2)
def test_parts_called_by_hand(act):
    assert_like_plain_torch(Tower, act, num_steps=3)


class TwoTowers(nn.Module):
    """Registered in one order, called in the other; one tower may be left out on all ranks."""

    def __init__(self):
        super().__init__()
        self.text = Tower(3)
        self.image = Tower(4)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.towers = ("image", "text")

    def forward(self, x):
        outputs = [getattr(self, name)(x) for name in self.towers]
        return self.temperature * sum(outputs) + outputs[0] * outputs[-1]


@ranks(2)
def test_towers_called_in_any_order():
    def act(model, rank, step):
        model.towers = [("image", "text"), ("text", "image"), ("image",), ("text", "image", "text")][step]
        return one_backward(model, rank, step)

    assert_like_plain_torch(TwoTowers, act, num_steps=4)


class CrossBlock(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.block = Block(width)
        self.cross = nn.Linear(width, width)

    def forward(self, hidden, memory):
        return self.block(hidden) + self.cross(memory)


class EncoderDecoder(nn.Module):
    """The decoder is registered first, and every block of it reads the encoder's output."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Linear(3, WIDTH)

    def forward(self, x):
        memory = self.shared(x)
        for block in self.encoder:
            memory = block(memory)
        hidden = self.shared(x.flip(0))
        for block in self.decoder:
            hidden = block(hidden, memory=memory)
        return hidden @ self.shared.weight


@ranks(2)
def test_a_decoder_registered_before_its_encoder():
    assert_like_plain_torch(EncoderDecoder, one_backward)


class Interleaved(nn.Module):
    """Two stacks whose blocks take turns."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        a = b = self.embed(x)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a) + 0.1 * b, right(b) + 0.1 * a
        return a * b


@ranks(2)
def test_stacks_whose_blocks_take_turns():
    assert_like_plain_torch(Interleaved, one_backward)


class BlockInBlock(nn.Module):
    """A block whose forward calls a block of another stack, as an adapter kept elsewhere is called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        hidden = self.embed(x)
        for block, adapter in zip(self.layers, self.adapters, strict=True):
            handle = block.up.register_forward_pre_hook(lambda _m, args, a=adapter: (a(args[0]),))
            hidden = block(hidden)
            handle.remove()
        return hidden


@ranks(2)
def test_a_block_called_inside_the_forward_of_another_is_exact_or_refused():
    assert_exact_or_refused(BlockInBlock, one_backward)


@ranks(2)
def test_sharding_around_or_inside_a_sharded_model_is_refused():
    """A model of which a part is sharded already, or that is part of a sharded one, is refused."""
    model, _, _ = sharded(Tower, 3)
    with pytest.raises(hf_zero.errors.HfZeroError):
        hf_zero.shard(nn.Sequential(model), stage=3, **SETTINGS)
    with pytest.raises(hf_zero.errors.HfZeroError):
        hf_zero.shard(model.layers, stage=3, **SETTINGS)


@ranks(2)
def test_two_sharded_models_in_one_loss():
    """A policy and its reference model, sharded each on its own, in one process."""
    for stage in ALL_STAGES:
        policy, frozen = build_seeded(Tower), build_seeded(Tower, seed=8).requires_grad_(False)
        plain_policy, plain_frozen = build_seeded(Tower), build_seeded(Tower, seed=8)
        engine = engine_of(hf_zero.shard(policy, stage=stage, **SETTINGS))
        hf_zero.shard(frozen, stage=stage, **SETTINGS)
        x = inputs(dist.get_rank(), 0)
        loss_of(policy(x) - frozen(x)).backward()
        for rank in range(2):
            x = inputs(rank, 0)
            loss_of(plain_policy(x) - plain_frozen(x).detach()).backward()
        for name, p in plain_policy.named_parameters():
            torch.testing.assert_close(
                hf_zero.ShardedModel(engine.model).full_grad(name), p.grad / 2, rtol=2e-5, atol=2e-6
            )
