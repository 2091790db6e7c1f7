"""Hooks that users put on parameters and modules see and change what they would in plain torch."""

import pytest
import torch
from torch import nn

from hf_zero.engine import direct
from tests.distributed import ranks
from tests.engine.models import WIDTH, Tower, inputs, loss_of, one_backward
from tests.engine.reference import assert_exact_or_refused, assert_like_plain_torch


pytestmark = pytest.mark.direct


def tensor_hooks(model):
    return [
        model.layers[1].up.weight.register_hook(lambda grad: grad * 3),
        model.layers[2].down.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
        model.embed.weight.register_hook(lambda grad: -grad),
    ]


def scale_grad(param) -> None:
    param.grad.mul_(0.5)


def accumulate_hooks(model):
    params = model.layers[1].up.weight, model.head.bias
    return [p.register_post_accumulate_grad_hook(scale_grad) for p in params]


def replacing_hooks(model):
    return [
        model.layers[0].register_forward_hook(lambda _m, _args, output: output * 0.5),
        model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,)),
        model.layers[2].up.register_forward_hook(lambda module, _args, output: output + module.bias.sum()),
        model.embed.register_forward_hook(lambda _m, _args, output: output.tanh()),
        model.register_forward_hook(lambda _m, _args, output: output + 0.25),
    ]


def a_detaching_hook(model):
    """The blocks before the one whose output is detached get no gradient at all."""
    return [model.layers[1].register_forward_hook(lambda _m, _args, output: output.detach())]


def a_hook_that_reads_its_block(model):
    return [model.layers[1].register_forward_hook(lambda module, _a, output: output + module.down.weight.mean())]


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    "hooks", [accumulate_hooks, replacing_hooks, tensor_hooks, a_detaching_hook, a_hook_that_reads_its_block]
)
@ranks(2)
def test_hooks_put_before_and_after_sharding_do_what_they_do_in_plain_torch(hooks):
    def build():
        model = Tower()
        hooks(model)
        return model

    assert_like_plain_torch(build, one_backward)

    def act(model, rank, step):
        handles = hooks(model)
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        return losses

    assert_like_plain_torch(Tower, act)


@ranks(2)
def test_full_backward_hooks_see_and_change_the_gradients():
    def act(model, rank, step):
        seen = []

        def record(_module, grad_input, grad_output):
            seen.extend(float(grad.abs().sum()) for grad in (*grad_input, *grad_output) if grad is not None)

        handles = [layer.register_full_backward_hook(record) for layer in model.layers]
        handles.append(model.layers[1].register_full_backward_pre_hook(lambda _m, grads: tuple(g * 2 for g in grads)))
        handles.append(model.layers[2].up.register_full_backward_hook(record))
        handles.append(
            model.layers[2].register_full_backward_hook(lambda _m, grads, _out: tuple(g * 0.5 for g in grads))
        )
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        assert len(seen) == 2 * (len(model.layers) + 1)
        return [*losses, *map(torch.tensor, seen)]

    assert_like_plain_torch(Tower, act)


@ranks(2)
def test_gradients_of_activations_can_be_retained():
    def act(model, rank, step):
        kept = []

        def keep(_module, _args, output):
            output.retain_grad()
            kept.append(output)

        handles = [layer.register_forward_hook(keep) for layer in model.layers]
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        return losses + [hidden.grad.norm() for hidden in kept]

    assert_like_plain_torch(Tower, act)


@pytest.mark.parametrize("chosen", [[0], [1], [3], [0, 1, 2, 3]], ids=str)
@ranks(2)
def test_a_loss_on_nothing_but_activations_from_inside_of_blocks_is_exact_or_refused(chosen):
    def act(model, rank, step):
        taken = []
        handles = [
            model.layers[index].up.register_forward_hook(lambda _m, _args, output: taken.append(output))
            for index in chosen
        ]
        model(inputs(rank, step))
        for handle in handles:
            handle.remove()
        loss = sum(loss_of(activation) for activation in taken)
        loss.backward()
        return [loss.detach()]

    assert_exact_or_refused(Tower, act)


class Returning(nn.Module):
    """A block whose output is what `kind` says: a fresh tensor, or a view of one."""

    def __init__(self, kind: str):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, hidden):
        hidden = self.lin(hidden)
        if self.kind == "view":
            hidden = (hidden * 2).view(hidden.shape)
        elif self.kind == "slice":
            hidden = torch.cat([hidden, hidden], dim=-1)[..., :WIDTH]
        elif self.kind == "view of a part":
            hidden = (hidden + 1).chunk(2, dim=-1)[1].repeat(1, 1, 2)[..., :].view(hidden.shape)
        return hidden


class Writing(Tower):
    """Writes to the blocks' outputs in place, whole and in part, and takes them in chunks."""

    def __init__(self, kind: str):
        super().__init__(3, block=lambda _width: Returning(kind))

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.mul_(1.5)
            hidden[..., :2] += 0.1
            first, second = hidden.chunk(2, dim=-1)
            hidden = torch.cat([first, torch.relu(second)], dim=-1)
        return self.head(hidden)


class Passing(nn.Module):
    """Hands on views of what it was given: whole, without any computation of its own, or a part."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.is_skipped = False

    def forward(self, hidden, part):
        if self.is_skipped:
            return hidden.view(hidden.shape), hidden[..., :2]
        return self.lin(hidden).view(hidden.shape), hidden[..., 1:3]


class Handing(Tower):
    def __init__(self):
        super().__init__(4, block=Passing)
        self.layers[2].is_skipped = True

    def forward(self, x):
        hidden = self.embed(x)
        part = hidden[..., :2]
        for layer in self.layers:
            hidden, part = layer(hidden, part)
        return self.head(hidden) + part


@ranks(2)
def test_a_block_may_return_views_of_what_it_was_given():
    def one_backward_in_rows(model, rank, step):
        loss = loss_of(model(inputs(rank, step, (2, 5, 3))))
        loss.backward()
        return [loss.detach()]

    assert_like_plain_torch(Handing, one_backward_in_rows)


@pytest.mark.parametrize("min_numel", [0, 2**16], ids=["direct", "small"])
@ranks(2)
def test_what_a_block_returns_may_be_written_to(min_numel):
    def one_backward_in_rows(model, rank, step):
        loss = loss_of(model(inputs(rank, step, (2, 5, 3))).mul_(1.1))
        loss.backward()
        return [loss.detach()]

    before, direct.MIN_NUMEL = direct.MIN_NUMEL, min_numel
    try:
        for kind in ("fresh", "view", "slice", "view of a part"):
            assert_like_plain_torch(lambda kind=kind: Writing(kind), one_backward_in_rows)
    finally:
        direct.MIN_NUMEL = before
