"""Blocks that one rank leaves out while the others use them: nobody waits, and the average counts them as zero."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from tests.distributed import run_ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of
from tests.engine.reference import SETTINGS, assert_stages_match
from tests.test_groups import on_two_hosts
from tests.tiers import more


pytestmark = pytest.mark.direct


LIMIT = 60.0


def run_with(order_of):
    """One step in which every rank calls the blocks that `order_of` gives it."""

    def act(model, rank, step):
        model.order = order_of(rank, step)
        loss = loss_of(model(inputs(rank, step)))
        loss.backward()
        return [loss.detach()]

    return act


ORDERS = {
    "middle": lambda rank, step: [0, 1, 3, 4] if rank == 0 else [0, 1, 2, 3, 4],
    "two in the middle": lambda rank, step: [0, 3, 4] if rank == 1 else [0, 1, 2, 3, 4],
    "first": lambda rank, step: [1, 2, 3, 4] if rank == 0 else [0, 1, 2, 3, 4],
    "last": lambda rank, step: [0, 1, 2, 3] if rank == 1 else [0, 1, 2, 3, 4],
    "all": lambda rank, step: [] if rank == 0 else [0, 1, 2, 3, 4],
    "all but one": lambda rank, step: [2] if rank == 0 else [0, 1, 2, 3, 4],
    "another on each": lambda rank, step: [i for i in range(5) if i % 2 != (rank + step) % 2],
    "nothing in common": lambda rank, step: [0, 1] if rank == 0 else [3, 4],
    "by turns": lambda rank, step: [0, 1, 2, 3, 4] if rank == step % 2 else [],
}


def five_blocks() -> Tower:
    return Tower(num_blocks=5)


def _orders(name, prefetch_units):
    assert_stages_match(five_blocks, run_with(ORDERS[name]), num_steps=3, prefetch_units=prefetch_units)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.full("more cases", after=5)
def test_blocks_skipped_on_one_rank(name):
    run_ranks(_orders, 2, name, 1, timeout=LIMIT)


@pytest.mark.parametrize("prefetch_units", [0, 2])
def test_blocks_skipped_on_one_rank_with_other_prefetching(prefetch_units):
    run_ranks(_orders, 2, "another on each", prefetch_units, timeout=LIMIT)


def _each_its_own():
    """Every rank leaves out another block, and the last rank all of them at one step."""

    def order_of(rank, step):
        return [] if (rank, step) == (2, 1) else [index for index in range(5) if index % 3 != rank]

    assert_stages_match(five_blocks, run_with(order_of), num_steps=3)


def test_blocks_skipped_on_three_ranks():
    run_ranks(_each_its_own, 3, timeout=LIMIT)


def _two_passes(skipped_pass):
    def act(model, rank, step):
        every, none = [0, 1, 2, 3, 4], []
        model.order = none if rank == 0 and skipped_pass == 0 else every
        first = loss_of(model(inputs(rank, step)))
        model.order = none if rank == 0 and skipped_pass == 1 else every
        second = loss_of(model(inputs(rank, step, salt=1)))
        (first + second).backward()
        return [first.detach(), second.detach()]

    assert_stages_match(five_blocks, act)


@pytest.mark.parametrize("skipped_pass", [0, 1])
def test_all_blocks_of_one_of_two_passes_skipped_on_one_rank(skipped_pass):
    run_ranks(_two_passes, 2, skipped_pass, timeout=LIMIT)


def _zero_grad_between():
    """Clearing old gradients between forward and backward is the habit of many training loops."""
    import hf_zero
    from tests.engine.reference import (
        SETTINGS,
        assert_equal_weights,
        assert_same_traffic,
        build_seeded,
        sgd,
        train_reference,
        weights_of,
    )

    act = run_with(ORDERS["another on each"])
    _, wanted = train_reference(five_blocks, act, num_steps=2)
    for stage in (1, 2, 3):
        model = build_seeded(five_blocks)
        engine = engine_of(hf_zero.shard(model, stage=stage, **SETTINGS))
        optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
        for step in range(2):
            model.order = ORDERS["another on each"](engine.comm.rank, step)
            loss = loss_of(model(inputs(engine.comm.rank, step)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_same_traffic(engine)
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}")


def test_zero_grad_between_forward_and_backward_with_skipped_blocks():
    run_ranks(_zero_grad_between, 2, timeout=LIMIT)


class SkippingInside(nn.Module):
    """A block that is called but gives back its input: its output is the former block's tensor."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.inner = Block(width)
        self.is_off = False

    def forward(self, hidden):
        return hidden if self.is_off else self.inner(hidden)


def _inside(off_everywhere):
    def act(model, rank, step):
        for index, layer in enumerate(model.layers):
            layer.is_off = index in (1, 2) and (off_everywhere or rank == 0)
        loss = loss_of(model(inputs(rank, step)))
        loss.backward()
        return [loss.detach()]

    assert_stages_match(lambda: Tower(5, block=SkippingInside), act)


@pytest.mark.parametrize("off_everywhere", [True, False])
def test_a_block_that_returns_its_input(off_everywhere):
    run_ranks(_inside, 2, off_everywhere, timeout=LIMIT)


class Experts(nn.Module):
    """Each batch goes to one expert; some experts get none on any rank."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(4))
        self.chosen = 0

    def forward(self, hidden):
        return hidden + self.experts[self.chosen](hidden)


def _experts(same_on_all_ranks):
    def act(model, rank, step):
        for layer in model.layers:
            layer.chosen = 1 + (step if same_on_all_ranks else rank)
        loss = loss_of(model(inputs(rank, step)))
        loss.backward()
        return [loss.detach()]

    assert_stages_match(lambda: ExpertTower(), act)


class ExpertTower(Tower):
    """Its blocks are named, as a model of transformers names them, since the experts' lists are longer."""

    _no_split_modules = ["Experts"]

    def __init__(self):
        super().__init__(3, block=Experts)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("same_on_all_ranks", [True, False])
def test_experts_that_a_rank_does_not_use(same_on_all_ranks):
    run_ranks(_experts, 2, same_on_all_ranks, timeout=LIMIT)


class TwoStacks(nn.Module):
    """Two stacks of equal blocks called by one forward: a message taken for another would go unnoticed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.first = nn.ModuleList(Block() for _ in range(3))
        self.second = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.use = (True, True)

    def forward(self, x):
        hidden = self.embed(x)
        for stack, used in zip((self.first, self.second), self.use, strict=True):
            for block in stack if used else ():
                hidden = block(hidden)
        return self.head(hidden)


def _two_stacks(skipped):
    def act(model, rank, step):
        model.use = tuple(not (rank == 0 and index == skipped) for index in range(2))
        loss = loss_of(model(inputs(rank, step)))
        loss.backward()
        return [loss.detach()]

    assert_stages_match(TwoStacks, act)


@pytest.mark.parametrize("skipped", [0, 1])
def test_one_of_two_stacks_skipped_on_one_rank(skipped):
    run_ranks(_two_stacks, 2, skipped, timeout=LIMIT)


class NestedStacks(nn.Module):
    """Stacks in a list: the parent of a stack's container has no forward of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.towers = nn.ModuleList(nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.skipped = ()

    def forward(self, x):
        hidden = self.embed(x)
        for tower, blocks in enumerate(self.towers):
            for index, block in enumerate(blocks):
                if (tower, index) not in self.skipped:
                    hidden = block(hidden)
        return self.head(hidden)


def _nested_stacks():
    def act(model, rank, step):
        model.skipped = ((0, 2), (1, 2)) if rank == 0 else ((1, 0),)
        loss = loss_of(model(inputs(rank, step)))
        loss.backward()
        return [loss.detach()]

    assert_stages_match(NestedStacks, act)


def test_the_last_block_of_nested_stacks_skipped_on_one_rank():
    run_ranks(_nested_stacks, 2, timeout=LIMIT)


def frozen_middle() -> Tower:
    """Blocks 1 and 2 are frozen, so whether backward comes to them depends on what was called before."""
    model = five_blocks()
    for block in model.layers[1:3]:
        block.requires_grad_(False)
    return model


def frozen_beginning() -> Tower:
    model = five_blocks()
    model.embed.requires_grad_(False)
    for block in model.layers[:3]:
        block.requires_grad_(False)
    return model


def _frozen(build, name):
    assert_stages_match(build, run_with(ORDERS[name]))


@pytest.mark.parametrize("name", ["middle", "first", "last", "all but one", "another on each"])
@pytest.mark.parametrize("build", [frozen_middle, frozen_beginning])
@pytest.mark.full("more cases", after=5)
def test_frozen_blocks_skipped_on_one_rank(build, name):
    run_ranks(_frozen, 2, build, name, timeout=LIMIT)


def _no_grad_skips():
    """Evaluation in which one rank leaves blocks out, between a forward and its backward."""

    def act(model, rank, step):
        import torch

        model.order = [0, 1, 2, 3, 4]
        loss = loss_of(model(inputs(rank, step)))
        with torch.no_grad():
            model.order = [0, 3] if rank == 0 else [1, 4]
            other = loss_of(model(inputs(rank, step, salt=1)))
        loss.backward()
        return [loss.detach(), other]

    assert_stages_match(five_blocks, act)


def test_blocks_skipped_on_one_rank_under_no_grad():
    run_ranks(_no_grad_skips, 2, timeout=LIMIT)


def _collectives_of_the_user(are_two_hosts: bool, settings: dict):
    """A rank leaves out a block and goes on to a collective of its own, in which it helps nobody."""

    def wait_for_everyone() -> None:
        dist.all_reduce(torch.ones(1))

    model = five_blocks()
    for module in (
        model.embed,
        *model.layers[:2],
        model.head,
    ):  # so no reduction follows the last gather of a backward
        module.requires_grad_(False)
    with on_two_hosts(are_two_hosts):
        engine = engine_of(hf_zero.shard(model, stage=3, **SETTINGS | settings))
    rank = engine.comm.rank
    for name in ("last", "first"):
        model.order = ORDERS[name](rank, 0)
        with torch.no_grad():
            model(inputs(rank, 0))
        wait_for_everyone()
        loss = loss_of(model(inputs(rank, 0).requires_grad_()))
        wait_for_everyone()
        loss.backward()
        wait_for_everyone()


@pytest.mark.parametrize("num_ranks, settings", [(4, {}), *more((2, {"shared_memory": False}))])
def test_a_collective_of_the_user_follows_a_skipped_block(num_ranks, settings):
    """Ranks of two hosts read one another's memory, so a gather needs all of a host."""
    run_ranks(_collectives_of_the_user, num_ranks, num_ranks == 4, settings, timeout=LIMIT)
