"""`hf_zero.gathered`: the way to whole parameters, at every stage, at any time."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.away import AwayParameter
from tests.distributed import ranks
from tests.engine.models import Tower, inputs, loss_of, one_backward
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


@ranks(2)
def test_modules_and_parameters_are_whole_inside():
    wanted = {name: p.detach().clone() for name, p in build_seeded(Tower).named_parameters()}
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        sharded = hf_zero.shard(model, stage=stage, **SETTINGS)
        engine, weight = engine_of(sharded), model.layers[1].up.weight
        for what in (model, weight, [weight], model.layers, model.layers[1], model.parameters(), iter([weight])):
            with hf_zero.gathered(what):
                assert torch.equal(weight, wanted["layers.1.up.weight"]), f"stage {stage}"
            assert_away(model, engine)
        with sharded.gathered(writeback=True):
            assert torch.equal(weight, wanted["layers.1.up.weight"]), f"stage {stage}"
            weight.data.zero_()
        with sharded.gathered():
            assert not weight.any()
        with hf_zero.gathered([]):
            pass
        with hf_zero.gathered(torch.nn.Linear(2, 2)):  # a module that is not sharded
            pass


@pytest.mark.quick
@ranks(3)
@torch.no_grad()
def test_writeback_takes_rank_0s_values_everywhere():
    """Rank 0's values become everyone's, whatever the others wrote, and training goes on from them."""
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        before = weights_of(model)
        written, assigned = chosen = [model.layers[1].up.weight, model.head.bias]
        with hf_zero.gathered(chosen, writeback=True):
            written.fill_(3.0 + dist.get_rank())
            assigned.data = torch.full_like(assigned, 3.0 + dist.get_rank())  # as PEFT merges some adapters
        assert_away(model, engine)
        after = weights_of(model)
        for name, value in after.items():
            wanted = torch.full_like(value, 3.0) if name in ("layers.1.up.weight", "head.bias") else before[name]
            assert torch.equal(value, wanted), f"stage {stage}: {name}"


@ranks(2)
def test_training_goes_on_from_what_was_written():
    def rewrite(model):
        with torch.no_grad(), hf_zero.gathered(model, writeback=True):
            for p in model.parameters():
                p.mul_(0.5)

    def act(model, rank, step):
        if step == 1 and (rank == 0 or engine_of(model) is not None):
            rewrite(model)
        return one_backward(model, rank, step)

    assert_like_plain_torch(Tower, act)


def masters_of(engine) -> dict[tuple[str, int], torch.Tensor]:
    return {(s.name, s.start): s.tensor.clone() for s in engine.named_shards()}


@ranks(2)
@torch.no_grad()
def test_writeback_updates_the_masters_of_what_was_written():
    """What is written in bf16 reaches the fp32 masters; what is not keeps their 16 lower bits."""
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=torch.bfloat16, **SETTINGS))
        before = masters_of(engine)
        assert all(tensor.dtype is torch.float32 for tensor in before.values())
        with hf_zero.gathered(model.layers[1].up.weight, writeback=True):
            assert model.layers[1].up.weight.dtype is torch.bfloat16
            model.layers[1].up.weight.fill_(0.75)
        for (name, start), tensor in masters_of(engine).items():
            if name == "layers.1.up.weight":
                assert bool((tensor == 0.75).all()), f"stage {stage}: {name} from {start}"
            else:
                assert torch.equal(tensor, before[name, start]), f"stage {stage}: {name} lost its lower bits"


@ranks(2)
@torch.no_grad()
def test_contexts_may_be_nested():
    wanted = {name: p.detach().clone() for name, p in build_seeded(Tower).named_parameters()}
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        first, second = model.layers[0].up.weight, model.layers[1].up.weight
        with hf_zero.gathered(first):
            with hf_zero.gathered([first, second], writeback=True):
                second.add_(1)
            assert torch.equal(first, wanted["layers.0.up.weight"]), f"stage {stage}"
            if stage == 3:
                assert isinstance(second, AwayParameter)
            with hf_zero.gathered(model):
                assert torch.equal(second, wanted["layers.1.up.weight"] + 1), f"stage {stage}"
        assert_away(model, engine)
        assert torch.equal(weights_of(model)["layers.1.up.weight"], wanted["layers.1.up.weight"] + 1)


def between(model, rank, step):
    loss = loss_of(model(inputs(rank, step)))
    with hf_zero.gathered(model):
        norm = sum(p.detach().square().sum() for p in model.parameters())
    loss.backward()
    return [loss.detach(), norm]


def inside(model, rank, step):
    with hf_zero.gathered(model):
        return one_backward(model, rank, step)


def forward_inside(model, rank, step):
    with hf_zero.gathered(model):
        return one_backward(model, rank, step)


def backward_inside(model, rank, step):
    loss = loss_of(model(inputs(rank, step)))
    with hf_zero.gathered(model):
        loss.backward()
    return [loss.detach()]


def part_inside(model, rank, step):
    with hf_zero.gathered([model.layers[1].up.weight, model.head.bias]):
        return one_backward(model, rank, step)


def evaluation_inside(model, rank, step):
    with torch.no_grad(), hf_zero.gathered(model):
        other = loss_of(model(inputs(rank, step, salt=1)))
    return [other, *one_backward(model, rank, step)]


def in_a_forward(model, rank, step):
    """A hook on one block reads other blocks: the one before, still in a slot, and the next, on its way."""
    norms = []

    def read(*_):
        for layer in (0, 1, 2, 3):
            with hf_zero.gathered(model.layers[layer]):
                norms.append(model.layers[layer].up.weight.detach().norm())
        with hf_zero.gathered(model.head):
            norms.append(model.head.weight.detach().norm())

    handle = model.layers[1].up.register_forward_hook(read)
    losses = one_backward(model, rank, step)
    handle.remove()
    return losses + norms


def in_a_backward(model, rank, step):
    norms = []

    def read(_module, _grad_input, _grad_output):
        for layer in (0, 1, 2, 3):
            with hf_zero.gathered(model.layers[layer]):
                norms.append(model.layers[layer].up.weight.detach().norm())

    handle = model.layers[1].up.register_full_backward_hook(read)
    losses = one_backward(model, rank, step)
    handle.remove()
    return losses + norms


def penalty_on_parameters(model, rank, step):
    """A regularisation term computed from the parameters themselves, inside the context."""
    with hf_zero.gathered(model):
        loss = loss_of(model(inputs(rank, step))) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
    return [loss.detach()]


@pytest.mark.full("more cases", after=4)
@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "act",
    [
        between,
        inside,
        forward_inside,
        backward_inside,
        part_inside,
        evaluation_inside,
        in_a_forward,
        in_a_backward,
        penalty_on_parameters,
    ],
)
@ranks(2)
def test_training_around_and_inside_the_context(act):
    assert_like_plain_torch(Tower, act)


@ranks(2)
def test_an_exception_leaves_the_context_in_order():
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        wanted = weights_of(model)
        with pytest.raises(ZeroDivisionError), hf_zero.gathered(model):
            raise ZeroDivisionError
        assert_away(model, engine)
        found = weights_of(model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@ranks(2)
def test_a_step_inside_the_context_is_refused_and_changes_nothing():
    """The refusal comes before the masters have moved: the same step outside is the first."""
    _, wanted = train_reference(Tower, one_backward, num_steps=1)
    for stage in (1, 2, 3):
        model, engine, optimizer = sharded(Tower, stage)
        with hf_zero.gathered(model):
            one_backward(model, dist.get_rank(), 0)
            with pytest.raises(hf_zero.errors.LifecycleError, match="gathered"):
                optimizer.step()
        optimizer.step()
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}")
        assert_same_traffic(engine)
