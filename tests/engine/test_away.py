"""Uses of parameters outside of the forward that has them whole: exact, or refused with the parameter's name."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import hf_zero
from hf_zero.engine import engine_of, flat, placeholder_guard
from hf_zero.engine.away import Placeholders, is_untouched
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
    "the last block's": lambda model, hidden: hidden * model.layers[2].norm.weight.pow(2),
    "without gradients": _counted,
    "item": lambda model, hidden: hidden * float(first(model)[0] > 0.5),
}


def _functional(name):
    x = inputs(dist.get_rank(), 0)
    model = build_seeded(lambda: Functional(USES[name]))
    engine = hf_zero.shard(model, stage=3, **SETTINGS)
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    with pytest.raises(LifecycleError, match=r"layers\.[02]\.(norm|up)\.weight: is used outside of its block"):
        loss_of(model(x)).backward()
        optimizer.step()
    optimizer.zero_grad()
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
def test_a_functional_use_outside_of_the_block_is_refused_by_name_in_the_first_forward(name):
    run_ranks(_functional, 2, name, timeout=LIMIT)


def _in_evaluation():
    model = build_seeded(lambda: Functional(lambda _model, hidden: hidden))
    hf_zero.shard(model, stage=3, **SETTINGS)
    one_backward(model, dist.get_rank(), 0)
    model.use = USES["sum"]
    with torch.no_grad(), pytest.raises(LifecycleError, match="layers.0.norm.weight"):
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
    """Looking at shapes, dtypes and devices, and making views, reads no value."""

    def use(model, hidden):
        weight = first(model)
        like = torch.zeros_like(weight) + weight.new_ones(weight.shape)
        return hidden.to(weight.dtype).view(-1, weight.view(1, -1).shape[1]).type_as(weight.data) * like

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


def _penalty_of_the_first_loss(penalty):
    model = build_seeded(Tower)
    engine = hf_zero.shard(model, stage=3, **SETTINGS)
    for _ in range(2):  # whoever catches it meets it again
        loss = loss_of(model(inputs(dist.get_rank(), 0)))
        with pytest.raises(LifecycleError, match=r"layers\.\d\.\w+\.\w+: is used outside"):
            loss + sum(penalty(p) for p in model.parameters())
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    with FlopCounterMode(display=False) as counter:
        loss = loss_of(model(inputs(dist.get_rank(), 0))) * 1.0
    loss.backward()
    optimizer.step()
    assert counter.get_total_flops() and _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("penalty", [_squares, _absolutes, _largest])
def test_a_loss_that_uses_parameters_that_are_away_is_refused_by_name(penalty):
    run_ranks(_penalty_of_the_first_loss, 2, penalty, timeout=LIMIT)


def _written_in_the_first_loss():
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    loss_of(model(inputs(dist.get_rank(), 0)))
    with torch.no_grad(), pytest.raises(LifecycleError, match="layers.1.up.weight: a parameter was written while"):
        model.layers[1].up.weight.mul_(0.5)


def test_a_write_behind_the_first_forward_is_told_with_the_parameters_name():
    run_ranks(_written_in_the_first_loss, 2, timeout=LIMIT)


def _no_backward():
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    model(inputs(dist.get_rank(), 0))
    guard = _get_current_dispatch_mode_stack()[-1]
    for _ in range(placeholder_guard.NUM_BEHIND_FORWARD):
        torch.zeros(())
        assert not guard.is_over
    torch.zeros(())
    assert guard.is_over
    placeholder_guard.PlaceholderGuard.remove_those_over()
    assert guard not in _get_current_dispatch_mode_stack()


def test_what_comes_behind_a_forward_without_a_backward_is_looked_at_for_a_while():
    run_ranks(_no_backward, 2, timeout=LIMIT)


def _penalty_alone():
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    with pytest.raises(LifecycleError, match=r"layers\.\d\.\w+\.\w+: a gradient came"):
        sum(p.pow(2).sum() for p in model.layers.parameters()).backward()


def test_a_backward_through_parameters_that_are_away_names_one():
    run_ranks(_penalty_alone, 2, timeout=LIMIT)


def _penalty_beside():
    """Nobody of ours runs between the end of the forward and the beginning of the penalty's backward."""
    model = build_seeded(Tower)
    engine = engine_of(hf_zero.shard(model, stage=3, **SETTINGS))
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    one_backward(model, dist.get_rank(), 0)  # the first is looked at more closely
    optimizer.step()
    wanted = weights_of(model)
    loss = loss_of(model(inputs(dist.get_rank(), 0))) + sum(p.pow(2).sum() for p in model.parameters())
    with pytest.raises(LifecycleError, match=r"layers\.\d\.\w+\.\w+: is used outside"):
        engine.refuse_misuse()  # as `ZeroAccelerator.backward` does
    loss.backward()
    with pytest.raises(NonFiniteError, match="a loss that uses parameters itself"):
        optimizer.step()
    found = weights_of(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_no_step_is_taken_on_a_penalty_of_parameters_that_are_away():
    run_ranks(_penalty_beside, 2, timeout=LIMIT)


def _penalty_inside():
    def act(model, rank, step):
        with hf_zero.gathered(model):
            loss = loss_of(model(inputs(rank, step))) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()
        return [loss.detach()]

    assert_stages_match(Tower, act)


def test_a_penalty_inside_gathered_is_exact():
    run_ranks(_penalty_inside, 2, timeout=LIMIT)


# Writes


WRITES = {
    "fill_": lambda p: p.data.fill_(1.0),
    "assignment": lambda p: setattr(p, "data", torch.ones_like(p)),
}


class Numbered(Block):
    def __init__(self, width: int = WIDTH):
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, hidden):
        return super().forward(hidden) * self.scale + self.table.sum()


def _writes_do_not_spread():
    for name in ("layers.1.up.weight", "layers.2.scale", "layers.0.table"):
        for write in WRITES.values():
            model = build_seeded(lambda: Tower(3, block=Numbered))
            engine = hf_zero.shard(model, stage=3, **SETTINGS)
            optimizer = hf_zero.ShardedOptimizer(engine, sgd(p for p in model.parameters() if p.requires_grad))
            wanted = weights_of(model)
            params = dict(model.named_parameters())
            write(params[name])
            for other, p in params.items():
                if other != name:
                    assert bool((p.isnan() if p.is_floating_point() else p == 0).all()), f"{name} to {other}"
            refusal = f"{name}: (a parameter was written while|was given other data while)"
            with pytest.raises(LifecycleError, match=refusal):
                model(inputs(0, 0))
            write(params[name])
            with pytest.raises(LifecycleError, match=refusal):
                optimizer.step()
            write(params[name])
            with pytest.raises(LifecycleError, match=name), hf_zero.gathered(model):
                pass
            found = weights_of(model)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_write_changes_no_other_parameter_and_is_refused_by_name():
    run_ranks(_writes_do_not_spread, 2, timeout=LIMIT)


def _no_look():
    def look(_placeholder):
        raise AssertionError("reads a value, for which a device would be waited for")

    own, flat.is_written = flat.is_written, look
    try:
        assert_stages_match(Tower, one_backward, stages=(3,))
    finally:
        flat.is_written = own


def test_nothing_is_read_to_know_that_nobody_wrote():
    run_ranks(_no_look, 2, timeout=LIMIT)


def test_a_placeholder_knows_on_the_host_that_it_was_written_to():
    placeholders = Placeholders(torch.device("cpu"))
    untouched, written = (placeholders.of(torch.Size([3, 4]), torch.float32) for _ in range(2))
    assert bool((untouched * 2).isnan().all())
    written.fill_(1.0)
    assert (is_untouched(untouched), is_untouched(written)) == (True, False)
