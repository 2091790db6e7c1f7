"""Gradient checkpointing of both kinds, around blocks and inside them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward, one_loss
from tests.engine.reference import assert_like_plain_torch


pytestmark = pytest.mark.direct


class OutsideTower(Tower):
    """Checkpoints around the calls of the blocks, so that their hooks run again in the recomputation."""

    use_reentrant = False
    segment = 1  # blocks

    def forward(self, x):
        hidden = self.embed(x)
        for low in range(0, len(self.order), self.segment):
            blocks = [self.layers[index] for index in self.order[low : low + self.segment]]
            hidden = checkpoint(nn.Sequential(*blocks), hidden, use_reentrant=self.use_reentrant)
        return self.head(hidden)


class PairedTower(OutsideTower):
    segment = 2


class WholeTower(OutsideTower):
    """One segment holds everything, root parameters included."""

    def forward(self, x):
        # reentrant segments differentiate only through inputs that require a gradient
        x = x.requires_grad_(self.use_reentrant)
        return checkpoint(super(OutsideTower, self).forward, x, use_reentrant=self.use_reentrant)


class InsideBlock(nn.Module):
    """Checkpoints inside its forward: its hooks stay outside of the recomputation."""

    use_reentrant = False

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.inner = Block(width)

    def forward(self, hidden):
        return checkpoint(self.inner, hidden, use_reentrant=self.use_reentrant)


class InsideTower(Tower):
    def __init__(self):
        super().__init__(4, block=InsideBlock)

    @property
    def use_reentrant(self):
        return self.layers[0].use_reentrant

    @use_reentrant.setter
    def use_reentrant(self, value):
        for layer in self.layers:
            layer.use_reentrant = value


def built(cls, use_reentrant, order=(0, 1, 2, 3)):
    def build():
        model = cls()
        model.use_reentrant, model.order = use_reentrant, list(order)
        return model

    return build


@pytest.mark.full("more cases", after=3)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cls", [OutsideTower, PairedTower, WholeTower, InsideTower])
@ranks(2)
def test_checkpointed_blocks_train_as_in_plain_torch(cls, use_reentrant):
    assert_like_plain_torch(built(cls, use_reentrant))


@pytest.mark.full("more cases", after=2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cls", [OutsideTower, InsideTower])
@ranks(2)
def test_checkpointed_blocks_used_twice_or_in_two_forwards_before_one_backward(cls, use_reentrant):
    def two_forwards(model, rank, step):
        return [one_loss(model, rank, step), loss_of(model(inputs(rank, step, salt=1)))]

    # a reentrant segment adds its gradients by itself, and stages 0 and 1 add in another place than 2 and 3
    assert_like_plain_torch(built(cls, use_reentrant), two_forwards, exact=not use_reentrant)
    assert_like_plain_torch(built(cls, use_reentrant, [0, 1, 2, 3] * 2), exact=not use_reentrant)


SKIPS = {
    "middle": ([0, 1, 3], [0, 1, 2, 3]),
    "last": ([0, 1, 2], [0, 1, 2, 3]),
    "first": ([1, 2, 3], [0, 1, 2, 3]),
    "different": ([0, 2], [1, 3]),
    "all": ([], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("use_reentrant, prefetch_units", [(False, 1), (True, 2)])
@pytest.mark.parametrize("cls", [OutsideTower, InsideTower])
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_checkpointed_blocks_skipped_on_one_rank(cls, use_reentrant, prefetch_units, name):
    def act(model, rank, step):
        model.order = SKIPS[name][rank]
        return one_loss(model, rank, step)

    assert_like_plain_torch(built(cls, use_reentrant), act, prefetch_units=prefetch_units)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cls", [OutsideTower, InsideTower])
@ranks(2)
def test_checkpointed_frozen_backbone(cls, use_reentrant):
    def build():
        model = built(cls, use_reentrant)()
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        list(model.layers[2].parameters())[1].requires_grad_(True)
        return model

    def act(model, rank, step):
        # as enable_input_require_grads does: without it a reentrant segment gives no gradient at all
        handle = model.embed.register_forward_hook(lambda _m, _a, output: output.requires_grad_(True))
        losses = one_backward(model, rank, step)
        handle.remove()
        return losses

    assert_like_plain_torch(build, act)


class EveryOther(Tower):
    """Every other block is checkpointed, of the two kinds in turn."""

    def forward(self, x):
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden) if index % 2 else checkpoint(layer, hidden, use_reentrant=index == 2)
        return self.head(hidden)


class Dropping(Block):
    def forward(self, hidden):
        return nn.functional.dropout(super().forward(hidden), 0.3, self.training)


class DroppingTower(OutsideTower):
    def __init__(self):
        super().__init__(4, block=Dropping)


@ranks(2)
def test_some_blocks_checkpointed_and_dropout_of_which_the_recomputation_draws_the_same_masks():
    assert_like_plain_torch(EveryOther)

    def act(model, rank, step):
        torch.manual_seed(31 * step + rank)
        return one_loss(model, rank, step)

    for use_reentrant in (False, True):
        assert_like_plain_torch(built(DroppingTower, use_reentrant), act)
