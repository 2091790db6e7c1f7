"""Modules and parameters that are used one by one, again, in another order, or in several forwards before a step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.errors import CommError, HfZeroError
from tests.distributed import ranks, run_new_ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_loss, through
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    TOLERANCE,
    assert_exact_or_refused,
    assert_like_plain_torch,
    build_seeded,
    reference_gradients,
    sharded,
)
from tests.tiers import in_core


pytestmark = pytest.mark.direct


class TwoStacks(nn.Module):
    """The stack that is registered first is called last, and reads what the other one returns."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Linear(3, WIDTH)

    def forward(self, x):
        memory = through(self.encoder, self.shared(x))
        hidden = self.shared(x.flip(0))
        for block in self.decoder:
            hidden = block(hidden) + 0.1 * memory
        return hidden @ self.shared.weight


class TakingTurns(TwoStacks):
    """The blocks of two stacks take turns."""

    def forward(self, x):
        a = b = self.shared(x)
        for left, right in zip(self.encoder, self.decoder, strict=True):
            a, b = left(a) + 0.1 * b, right(b) + 0.1 * a
        return a * b


def called(*order: int) -> Tower:
    model = Tower(num_blocks=max(order) + 1)
    model.order = list(order)
    return model


def shared_group() -> Tower:
    return called(0, 1, 2, 0, 1, 2)


def tied_across_blocks() -> Tower:
    model = Tower(num_blocks=4)
    model.layers[3].up.weight = model.layers[0].up.weight
    model.layers[2].norm = model.layers[1].norm
    return model


def another_order(model, rank, step):
    model.order = [[0, 1, 2, 3], [2, 0, 3, 1], [3, 3, 0, 1, 2]][step]
    return one_loss(model, rank, step)


def some_blocks_then_the_model(model, rank, step):
    return loss_of(through(model.layers[:2], wide(rank, step))) + one_loss(model, rank, step)


def early_exit(model, rank, step):
    """A loss after two of four blocks, and one at the end."""
    hidden = through(model.layers[:2], model.embed(inputs(rank, step)))
    return [loss_of(model.head(hidden)), loss_of(model.head(through(model.layers[2:], hidden)))]


def wide(rank, step) -> torch.Tensor:
    """Inputs of a block."""
    return inputs(rank, step, shape=(5, WIDTH))


# By name: a model, and what is called.
CALLS = {
    "blocks by hand": (
        Tower,
        lambda model, *at: loss_of(model.head(through(model.layers, model.embed(inputs(*at))))),
    ),
    "a block used again": (lambda: called(0, 0, 0), one_loss),
    "blocks alone": (Tower, lambda model, *at: loss_of(through(model.layers, wide(*at)))),
    "one block alone": (Tower, lambda model, *at: loss_of(model.layers[2](wide(*at)))),
    "some blocks, then the model": (Tower, some_blocks_then_the_model),
    "the embedding alone": (Tower, lambda model, *at: loss_of(model.embed(inputs(*at)))),
    "an early exit": (Tower, early_exit),
    "the forward, past the hooks": (Tower, lambda model, *at: loss_of(model.forward(inputs(*at)))),
    "a stack registered after one that reads it": (TwoStacks, one_loss),
    "stacks that take turns": (TakingTurns, one_loss),
    "blocks used again": (shared_group, one_loss),
    "blocks in reverse": (lambda: called(3, 2, 1, 0), one_loss),
    "parameters tied across blocks": (tied_across_blocks, one_loss),
    "another order at each step": (Tower, another_order),
}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", CALLS)
@ranks(2)
def test_however_modules_are_called_they_train_as_in_plain_torch(name):
    assert_like_plain_torch(*CALLS[name], num_steps=3)


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
    assert_exact_or_refused(BlockInBlock)


def two_forwards(model, rank, step):
    return one_loss(model, rank, step) - 0.5 * loss_of(model(inputs(rank, step, salt=1))).tanh()


def no_grad_between(model, rank, step):
    """A reference policy's forward before, inference mode between, and a last one behind."""
    with torch.no_grad():
        before = loss_of(model(inputs(rank, step, salt=1)))
    loss = one_loss(model, rank, step)
    with torch.inference_mode():
        between = loss_of(model(inputs(rank, step, salt=2))).clone()
    with torch.no_grad():
        return [loss, before, between, loss_of(model(inputs(rank, step, salt=3)))]


def forward_without_backward(model, rank, step):
    """A graph that is thrown away, before and between."""
    model(inputs(rank, step, salt=5))
    loss = one_loss(model, rank, step)
    model(inputs(rank, step, salt=6))
    return loss


def accumulated(model, rank, step, num_micro: int = 3):
    losses = [loss_of(model(inputs(rank, step, salt=micro))) / num_micro for micro in range(num_micro)]
    for loss in losses[:-1]:
        loss.backward()
    return losses[-1]


def two_losses_reversed(model, rank, step):
    losses = [loss_of(model(inputs(rank, step, salt=salt))) for salt in range(2)]
    losses[1].backward()
    return losses[0]


def retained_graph(model, rank, step):
    output = model(inputs(rank, step))
    loss_of(output).backward(retain_graph=True)
    return output.sum() * 0.01


def accumulated_then_two_forwards(model, rank, step):
    accumulated(model, rank, step).backward()
    return two_forwards(model, rank, step)


def evaluating_in_the_middle(model, rank, step):
    one_loss(model, rank, step).backward()
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model(inputs(rank, step, salt=9))) for _ in range(1 + step)]
    model.train()
    return [*losses, loss_of(model(inputs(rank, step, salt=2)))]


ONE_BACKWARD = [two_forwards, no_grad_between, forward_without_backward]
# Stages 0 and 1 add the backwards up before they sum over the ranks, stages 2 and 3 after: their bits differ.
SEVERAL_BACKWARDS = [
    accumulated,
    two_losses_reversed,
    retained_graph,
    accumulated_then_two_forwards,
    evaluating_in_the_middle,
]
ACTS = [(act, build) for act in (*ONE_BACKWARD, *SEVERAL_BACKWARDS) for build in (Tower, shared_group)]
CORE = [
    (two_forwards, Tower),
    (accumulated, shared_group),
    (no_grad_between, shared_group),
    (forward_without_backward, Tower),
    (two_losses_reversed, shared_group),
    (retained_graph, Tower),
    (accumulated_then_two_forwards, Tower),
    (evaluating_in_the_middle, Tower),
]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("act, build", in_core(CORE, sorted(ACTS, key=lambda pair: pair not in CORE)))
@ranks(2)
def test_several_forwards_or_backwards_before_a_step_train_as_in_plain_torch(act, build):
    assert_like_plain_torch(build, act, exact=act in ONE_BACKWARD)


@ranks(2)
def test_backwards_through_a_kept_graph_pass_over_what_other_ranks_use():
    """While another forward waits for its backward. Each rank leaves out other blocks."""

    def act(model, rank, step):
        model.order = [0, 1, 2, 3] if (rank + step) % 2 else [0, 3]
        first = one_loss(model, rank, step)
        first.backward(retain_graph=True)
        second = loss_of(model(inputs(rank, step, salt=1)))
        (first * 0.5).backward()
        return second

    assert_like_plain_torch(Tower, act, exact=False, timeout_seconds=10.0)


@ranks(2)
def test_more_forwards_in_one_loss_than_anyone_counts():
    """Gradient caching, or a rollout whose steps are all kept."""

    def act(model, rank, step):
        return sum(loss_of(model(inputs(rank, step, salt=salt))) for salt in range(70)) / 70

    assert_like_plain_torch(Tower, act, stages=(2, 3))


@ranks(2)
def test_any_number_of_units_ahead_gives_the_same():
    for build in (Tower, shared_group, tied_across_blocks):
        for prefetch_units in (0, 2, 9):
            assert_like_plain_torch(build, two_forwards, stages=(3,), prefetch_units=prefetch_units)


def _rounds_by_rank() -> None:
    def rounds(model, rank, step):
        model.order = [0, 1, 2] * (1 + rank)
        return one_loss(model, rank, step)

    # the first to give up ends its connections
    told = r"of unit 'layers\.\d': rank \d .*(if it waits too, the ranks have run different forwards|has ended)"
    with pytest.raises(CommError, match=told):
        assert_like_plain_torch(Tower, rounds, stages=(3,), shared_memory=False, timeout_seconds=2.0)


def test_ranks_that_call_blocks_in_unlike_numbers_of_rounds_are_told():
    """Adaptive depth: one rank goes through the blocks once, the other twice. Who waits learns for which unit, for
    whom, and why it may be."""
    run_new_ranks(_rounds_by_rank, 2)  # whose connections end with it


@ranks(2)
def test_sharding_around_or_inside_a_sharded_model_is_refused():
    model, _, _ = sharded(Tower, 3)
    for module in (nn.Sequential(model), model.layers):
        with pytest.raises(HfZeroError):
            hf_zero.shard(module, stage=3, **SETTINGS)


@pytest.mark.support(
    "A plain or sharded teacher beside a sharded student", area="Models in one process", stages=(1, 2, 3)
)
@ranks(2)
def test_two_models_in_one_loss():
    """A student, and its teacher or reference model, whose head gets gradients too: plain, or sharded on its own."""

    def act(pair, rank, step):
        return loss_of(pair[0](inputs(rank, step)) - pair[1](inputs(rank, step)))

    def pair() -> nn.ModuleList:
        teacher = Tower(5).requires_grad_(False)
        teacher.head.requires_grad_(True)
        return nn.ModuleList([Tower(), teacher])

    wanted = reference_gradients(build_seeded(pair), act)
    for stage, other in [(own, other) for own in ALL_STAGES for other in dict.fromkeys([None, own, 3])]:
        models = build_seeded(pair)
        for model, own_stage in zip(models, (stage, other)):
            if own_stage is not None:
                hf_zero.shard(model, stage=own_stage, **SETTINGS)
        act(models, dist.get_rank(), 0).backward()
        for number, model in enumerate(models[: 1 if other is None else 2]):
            for name, p in model.named_parameters():
                if p.requires_grad:
                    found = hf_zero.ShardedModel(model).full_grad(name)
                    torch.testing.assert_close(found, wanted[f"{number}.{name}"], **TOLERANCE)
