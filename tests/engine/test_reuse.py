"""Blocks and parameters that are used more than once, or in an order of their own, between two optimizer steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_zero.engine.unit import Unit
from hf_zero.errors import CommError
from tests.distributed import ranks, run_new_ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import assert_like_plain_torch, sharded


pytestmark = pytest.mark.direct


def shared_block() -> Tower:
    model = Tower(num_blocks=1)
    model.order = [0, 0, 0]
    return model


def shared_group() -> Tower:
    model = Tower(num_blocks=3)
    model.order = [0, 1, 2, 0, 1, 2]
    return model


def reversed_order() -> Tower:
    model = Tower(num_blocks=4)
    model.order = [3, 2, 1, 0]
    return model


def tied_across_blocks() -> Tower:
    model = Tower(num_blocks=4)
    model.layers[3].up.weight = model.layers[0].up.weight
    model.layers[2].norm = model.layers[1].norm
    return model


class TiedHead(nn.Module):
    """The embedding is the head, read by the outer forward without calling a module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden @ self.embed.weight.t()


def tied_backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = loss_of(model(torch.randint(0, 17, (2, 5), generator=generator)))
    loss.backward()
    return [loss.detach()]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build", [Tower, shared_block, shared_group, reversed_order, tied_across_blocks])
@ranks(2)
def test_blocks_used_again_train_as_in_plain_torch(build):
    assert_like_plain_torch(build, one_backward)


@ranks(2)
def test_an_embedding_read_as_head_trains_as_in_plain_torch():
    assert_like_plain_torch(TiedHead, tied_backward)


def changing_order(model, rank, step):
    model.order = [[0, 1, 2, 3], [2, 0, 3, 1], [3, 3, 0, 1, 2]][step]
    return one_backward(model, rank, step)


@ranks(2)
def test_blocks_may_be_called_in_another_order_at_every_step():
    assert_like_plain_torch(Tower, changing_order, num_steps=3)


def two_forwards_one_backward(model, rank, step):
    chosen, rejected = model(inputs(rank, step)), model(inputs(rank, step, salt=1))
    loss = loss_of(chosen) - 0.5 * loss_of(rejected).tanh()
    loss.backward()
    return [loss.detach()]


def two_losses(model, rank, step):
    first, second = loss_of(model(inputs(rank, step))), loss_of(model(inputs(rank, step, salt=1)))
    first.backward()
    second.backward()
    return [first.detach(), second.detach()]


def two_losses_reversed(model, rank, step):
    first, second = loss_of(model(inputs(rank, step))), loss_of(model(inputs(rank, step, salt=1)))
    second.backward()
    first.backward()
    return [first.detach(), second.detach()]


def retained_graph(model, rank, step):
    output = model(inputs(rank, step))
    first, second = loss_of(output), output.sum() * 0.01
    first.backward(retain_graph=True)
    second.backward()
    return [first.detach(), second.detach()]


def three_accumulated(model, rank, step):
    losses = []
    for micro in range(3):
        loss = loss_of(model(inputs(rank, step, salt=micro))) / 3
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulated_then_two_forwards(model, rank, step):
    return three_accumulated(model, rank, step) + two_forwards_one_backward(model, rank, step)


def forward_without_backward(model, rank, step):
    """A graph that is thrown away, before and between."""
    model(inputs(rank, step, salt=5))
    loss = loss_of(model(inputs(rank, step)))
    model(inputs(rank, step, salt=6))
    loss.backward()
    return [loss.detach()]


def no_grad_between(model, rank, step):
    loss = loss_of(model(inputs(rank, step)))
    with torch.no_grad():
        other = loss_of(model(inputs(rank, step, salt=1)))
    loss.backward()
    return [loss.detach(), other]


def no_grad_first_half_outside(model, rank, step):
    """A reference policy's forward before, and inference mode between."""
    with torch.no_grad():
        before = loss_of(model(inputs(rank, step, salt=1)))
    loss = loss_of(model(inputs(rank, step)))
    with torch.inference_mode():
        between = loss_of(model(inputs(rank, step, salt=2)))
    loss.backward()
    return [loss.detach(), before, between.clone()]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build", [Tower, shared_group])
@pytest.mark.parametrize(
    "act", [two_forwards_one_backward, no_grad_between, no_grad_first_half_outside, forward_without_backward]
)
@pytest.mark.full("more cases", after=4)
@ranks(2)
def test_several_forwards_before_one_backward(act, build):
    assert_like_plain_torch(build, act)


@ranks(2)
def test_more_forwards_in_one_loss_than_anyone_counts():
    """Gradient caching, or a rollout whose steps are all kept."""

    def act(model, rank, step):
        loss = sum(loss_of(model(inputs(rank, step, salt=salt))) for salt in range(70)) / 70
        loss.backward()
        return [loss.detach()]

    assert_like_plain_torch(Tower, act)


def evaluating_in_the_middle(model, rank, step):
    losses = one_backward(model, rank, step)
    model.eval()
    with torch.no_grad():
        losses += [loss_of(model(inputs(rank, step, salt=9))) for _ in range(1 + step)]
    model.train()
    second = loss_of(model(inputs(rank, step, salt=2)))
    second.backward()
    return losses + [second.detach()]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build", [Tower, shared_group])
@pytest.mark.parametrize(
    "act",
    [
        two_losses,
        two_losses_reversed,
        retained_graph,
        three_accumulated,
        accumulated_then_two_forwards,
        evaluating_in_the_middle,
    ],
)
@pytest.mark.full("more cases", after=7)
@ranks(2)
def test_several_backwards_before_a_step_add_up(act, build):
    # stages 0 and 1 add the backwards up before they sum over the ranks, stages 2 and 3 after
    assert_like_plain_torch(build, act, exact=False)


@ranks(2)
def test_any_number_of_units_ahead_gives_the_same():
    for build in (Tower, shared_group, tied_across_blocks):
        for prefetch_units in (0, 2, 9):
            assert_like_plain_torch(build, two_forwards_one_backward, stages=(2, 3), prefetch_units=prefetch_units)


@ranks(2)
def test_the_next_gather_is_on_its_way_before_one_is_waited_for():
    """Else the link is idle from the end of each to the beginning of the next."""
    order = []

    def noted(method, what):
        return lambda unit, **settings: (order.append((what, unit.name)), method(unit, **settings))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "_begin_all_gather", noted(Unit._begin_all_gather, "begins"))
        patch.setattr(Unit, "unshard", noted(Unit.unshard, "is needed"))
        model, _, _ = sharded(Tower, 3, shared_memory=False)
        one_backward(model, dist.get_rank(), 0)
        order.clear()
        loss = loss_of(model(inputs(dist.get_rank(), 1)))
        num_in_forward = len(order)
        loss.backward()
    blocks = [f"layers.{index}" for index in range(4)]
    # when backward begins, the last two are still there
    for part, way in ((order[:num_in_forward], blocks), (order[num_in_forward:], blocks[2::-1])):
        for block, following in zip(way, way[1:]):
            assert part.index(("begins", following)) < part.index(("is needed", block)), part


def _rounds_by_rank() -> None:
    def rounds(model, rank, step):
        model.order = [0, 1, 2] * (1 + rank)
        return one_backward(model, rank, step)

    # the first to give up ends its connections
    told = r"of unit 'layers\.\d': rank \d .*(if it waits too, the ranks have run different forwards|has ended)"
    with pytest.raises(CommError, match=told):
        assert_like_plain_torch(Tower, rounds, stages=(3,), shared_memory=False, timeout_seconds=2.0)


def test_ranks_that_call_blocks_in_unlike_numbers_of_rounds_are_told():
    """Adaptive depth: one rank goes through the blocks once, the other twice. Who waits learns for which unit, for
    whom, and why it may be."""
    run_new_ranks(_rounds_by_rank, 2)  # whose connections end with it
