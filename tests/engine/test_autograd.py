"""Ways into autograd other than `loss.backward()`, and the one that is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.distributed import ranks
from tests.engine.models import WIDTH, Tower, inputs, loss_of, one_backward
from tests.engine.reference import (
    ALL_STAGES,
    TOLERANCE,
    assert_away,
    assert_like_plain_torch,
    build_seeded,
    sgd,
    sharded,
    weights_of,
)


pytestmark = pytest.mark.direct


def grad_of_parameters(model, rank, step):
    """This rank's own gradients, by `torch.autograd.grad`; then an ordinary backward."""
    loss = loss_of(model(inputs(rank, step, salt=1)))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *(grad.norm() for grad in grads), *one_backward(model, rank, step)]


def grad_of_some_parameters(model, rank, step):
    loss = loss_of(model(inputs(rank, step, salt=1)))
    chosen = [model.layers[1].up.weight, model.layers[3].norm.bias, model.embed.weight]
    grads = torch.autograd.grad(loss, chosen, retain_graph=True)
    loss.backward()
    return [loss.detach(), *(grad.norm() for grad in grads)]


def grad_of_inputs(model, rank, step):
    x = inputs(rank, step, salt=1).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(x)), x)
    return [grad.norm(), grad[0, 0], *one_backward(model, rank, step)]


def grad_of_activation(model, rank, step):
    """Backward stops in the middle of the model."""
    taken = []
    handle = model.layers[1].register_forward_hook(lambda _m, _args, output: taken.append(output))
    loss = loss_of(model(inputs(rank, step, salt=1)))
    handle.remove()
    (grad,) = torch.autograd.grad(loss, taken[0])
    return [grad.norm(), *one_backward(model, rank, step)]


def backward_into_inputs(model, rank, step):
    """`backward(inputs=...)` accumulates into the named leaves only."""
    x = inputs(rank, step, salt=1).requires_grad_()
    loss = loss_of(model(x))
    loss.backward(inputs=[x, model.layers[2].up.weight, model.head.bias])
    return [loss.detach(), x.grad.norm(), *one_backward(model, rank, step)]


def several_roots(model, rank, step):
    output = model(inputs(rank, step))
    first, second = loss_of(output), output.abs().mean()
    torch.autograd.backward([first, second], [torch.tensor(0.5), torch.tensor(2.0)])
    return [first.detach(), second.detach()]


def gradient_given_by_hand(model, rank, step):
    """Half of a pipeline: the gradient of the output comes from elsewhere."""
    output = model(inputs(rank, step))
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return [output.detach().sum()]


def output_in_two_parts(model, rank, step):
    """The graph is cut at the output, and the loss works on a leaf of its own."""
    output = model(inputs(rank, step))
    leaf = output.detach().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    output.backward(leaf.grad)
    return [loss.detach()]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    "act",
    [
        grad_of_parameters,
        grad_of_some_parameters,
        grad_of_inputs,
        grad_of_activation,
        backward_into_inputs,
        several_roots,
        gradient_given_by_hand,
        output_in_two_parts,
    ],
)
@ranks(2)
def test_autograd_gives_what_plain_torch_gives(act):
    assert_like_plain_torch(Tower, act, exact=False)


@ranks(2)
def test_gradients_taken_by_autograd_grad_are_not_stepped_with():
    """Gradients taken by `torch.autograd.grad` alone are the caller's: a step after them changes nothing."""
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(Tower, stage)
        before = weights_of(model)
        torch.autograd.grad(loss_of(model(inputs(dist.get_rank(), 0))), list(model.parameters()))
        optimizer.step()
        assert_away(model, engine)
        after = weights_of(model)
        assert all(torch.equal(before[name], after[name]) for name in before), f"stage {stage}"


@ranks(2)
def test_backward_with_create_graph_is_refused_with_a_reason():
    """A gradient penalty on the parameters' gradients would need gathers that no rank can foresee."""
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(Tower, stage)
        loss = loss_of(model(inputs(dist.get_rank(), 0)))
        with pytest.raises(hf_zero.errors.UnsupportedError, match="double backward"):
            loss.backward(create_graph=True)
        optimizer.zero_grad()
        _next_step_is_clean(model, optimizer)


@ranks(2)
def test_a_penalty_on_input_gradients_is_exact_or_refused():
    """The penalty of a critic differentiates the gradient of its inputs: exact, or refused at once."""
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(Tower, stage)
        x = inputs(dist.get_rank(), 0).requires_grad_()
        if stage >= 2:
            with pytest.raises(hf_zero.errors.UnsupportedError, match="double backward"):
                torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
            optimizer.zero_grad()
            _next_step_is_clean(model, optimizer)
            continue
        (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        grad.square().sum().backward()
        found = hf_zero.ShardedModel(engine.model).full_grad("layers.1.up.weight")
        reference = build_seeded(Tower)
        for rank in range(2):
            x = inputs(rank, 0).requires_grad_()
            (grad,) = torch.autograd.grad(loss_of(reference(x)), x, create_graph=True)
            grad.square().sum().backward()
        torch.testing.assert_close(found, reference.layers[1].up.weight.grad / 2, **TOLERANCE)


@ranks(2)
def test_a_backward_through_a_forward_of_before_the_step_is_refused():
    """The parameters have new values: torch refuses that where its own optimizers have written them. What the step
    left out may still be differentiated."""
    for stage in ALL_STAGES:
        model, _, optimizer = sharded(Tower, stage)
        loss = loss_of(model(inputs(dist.get_rank(), 0)))
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        optimizer.step()  # without gradients
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        one_backward(model, dist.get_rank(), 0)
        optimizer.step()


def _next_step_is_clean(model, optimizer):
    one_backward(model, dist.get_rank(), 0)
    optimizer.step()
    found = weights_of(model)
    reference = build_seeded(Tower)
    plain = sgd(reference.parameters())
    for rank in range(2):
        one_backward(reference, rank, 0)
    for p in reference.parameters():
        p.grad /= 2
    plain.step()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), **TOLERANCE)


@ranks(2)
def test_full_grad_is_the_average_over_the_ranks():
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        assert hf_zero.ShardedModel(engine.model).full_grad("head.bias") is None
        one_backward(model, dist.get_rank(), 0)
        reference = build_seeded(Tower)
        for rank in range(2):
            one_backward(reference, rank, 0)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(hf_zero.ShardedModel(engine.model).full_grad(name), p.grad / 2, **TOLERANCE)
        with pytest.raises(KeyError):
            hf_zero.ShardedModel(engine.model).full_grad("no such name")


class Adding(nn.Module):
    """Adds to what it was given, and returns that."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden):
        hidden += self.down(torch.tanh(self.up(hidden.clone())))
        return hidden


class Silent(Adding):
    """Adds to what it was given, and returns nothing."""

    def forward(self, hidden):
        super().forward(hidden)


class Clamping(Adding):
    """Writes to what it was given without a history, and returns another tensor."""

    def forward(self, hidden):
        with torch.no_grad():
            hidden.clamp_(-1.0, 1.0)
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Written(Tower):
    """Takes from its blocks what they write to a view."""

    def forward(self, x):
        hidden = (2 * self.embed(x)).view(x.shape[0], -1)
        for layer in self.layers:
            layer(hidden)
        return self.head(hidden)


@ranks(2)
def test_a_block_may_write_to_what_it_was_given():
    for tower, block in ((Tower, Adding), (Tower, Clamping), (Written, Adding), (Written, Silent)):
        for is_frozen in (False, True):

            def build(tower=tower, block=block, is_frozen=is_frozen):
                model = tower(4, block=block)
                model.layers.requires_grad_(not is_frozen)
                return model

            assert_like_plain_torch(build, grad_of_inputs, exact=False)


class Bare(Tower):
    """Returns what its last block returns."""

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def two_graphs_in_order(model, rank, step):
    losses = [loss_of(model(inputs(rank, step, salt=salt))) for salt in (0, 1)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


@ranks(2)
def test_of_two_graphs_the_first_may_come_first():
    for build in (Tower, Bare):
        assert_like_plain_torch(build, two_graphs_in_order, exact=False)
