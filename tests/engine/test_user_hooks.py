"""Hooks that users put on parameters and modules see and change what they would in plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import direct
from tests.distributed import run_ranks
from tests.engine.models import WIDTH, Tower, inputs, loss_of
from tests.engine.reference import ALL_STAGES, SETTINGS, assert_exact_or_refused, assert_stages_match, build_seeded


pytestmark = pytest.mark.direct


LIMIT = 60.0


def one_backward(model, rank, step):
    loss = loss_of(model(inputs(rank, step)))
    loss.backward()
    return [loss.detach()]


def with_tensor_hooks() -> Tower:
    model = Tower()
    model.layers[1].up.weight.register_hook(lambda grad: grad * 3)
    model.layers[2].down.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.embed.weight.register_hook(lambda grad: -grad)
    return model


def _tensor_hooks():
    assert_stages_match(with_tensor_hooks, one_backward)

    def register_on_the_fly(model, rank, step):
        handle = model.layers[1].up.weight.register_hook(lambda grad: grad * 2)
        losses = one_backward(model, rank, step)
        handle.remove()
        return losses

    assert_stages_match(Tower, register_on_the_fly)


def test_tensor_hooks_on_parameters_change_the_gradient():
    run_ranks(_tensor_hooks, 2, timeout=LIMIT)


def scale_grad(param) -> None:
    param.grad.mul_(0.5)


def with_accumulate_hooks() -> Tower:
    model = Tower()
    for p in (model.layers[1].up.weight, model.head.bias):
        p.register_post_accumulate_grad_hook(scale_grad)
    return model


def _accumulate_hooks():
    assert_stages_match(with_accumulate_hooks, one_backward)


def test_post_accumulate_hooks_put_before_sharding_change_the_gradient():
    run_ranks(_accumulate_hooks, 2, timeout=LIMIT)


def _accumulate_hooks_afterwards():
    def act(model, rank, step):
        handles = [
            p.register_post_accumulate_grad_hook(scale_grad) for p in (model.layers[1].up.weight, model.head.bias)
        ]
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        return losses

    assert_stages_match(Tower, act)


@pytest.mark.quick
def test_post_accumulate_hooks_put_after_sharding_change_the_gradient():
    run_ranks(_accumulate_hooks_afterwards, 2, timeout=LIMIT)


def with_replacing_hooks() -> Tower:
    model = Tower()
    model.layers[0].register_forward_hook(lambda _m, _args, output: output * 0.5)
    model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,))
    model.layers[2].up.register_forward_hook(lambda module, _args, output: output + module.bias.sum())
    model.embed.register_forward_hook(lambda _m, _args, output: output.tanh())
    model.register_forward_hook(lambda _m, _args, output: output + 0.25)
    return model


def _replacing_hooks():
    assert_stages_match(with_replacing_hooks, one_backward)

    def afterwards(model, rank, step):
        handles = [
            model.layers[0].register_forward_hook(lambda _m, _args, output: output * 0.5),
            model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,)),
            model.layers[2].up.register_forward_hook(lambda module, _args, output: output + module.bias.sum()),
            model.register_forward_hook(lambda _m, _args, output: output + 0.25),
        ]
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        return losses

    assert_stages_match(Tower, afterwards)


@pytest.mark.quick
def test_forward_hooks_may_replace_inputs_and_outputs():
    run_ranks(_replacing_hooks, 2, timeout=LIMIT)


def _detaching_hook():
    """The blocks before the one whose output is detached get no gradient at all."""

    def act(model, rank, step):
        handle = model.layers[1].register_forward_hook(lambda _m, _args, output: output.detach())
        losses = one_backward(model, rank, step)
        handle.remove()
        return losses

    assert_stages_match(Tower, act)


def test_a_forward_hook_may_detach_an_output():
    run_ranks(_detaching_hook, 2, timeout=LIMIT)


def _reads_own_parameters():
    """A hook on a block that reads the block's parameters, put there before and after sharding."""

    def add_mean(module, _args, output):
        return output + module.down.weight.mean()

    def build():
        model = Tower()
        model.layers[1].register_forward_hook(add_mean)
        return model

    assert_stages_match(build, one_backward)

    def act(model, rank, step):
        handle = model.layers[1].register_forward_hook(add_mean)
        losses = one_backward(model, rank, step)
        handle.remove()
        return losses

    assert_stages_match(Tower, act)


def test_a_forward_hook_on_a_block_may_read_the_block():
    run_ranks(_reads_own_parameters, 2, timeout=LIMIT)


def _backward_hooks():
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

    assert_stages_match(Tower, act)


def test_full_backward_hooks_see_and_change_the_gradients():
    run_ranks(_backward_hooks, 2, timeout=LIMIT)


def _retain_grad():
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

    assert_stages_match(Tower, act)


def test_gradients_of_activations_can_be_retained():
    run_ranks(_retain_grad, 2, timeout=LIMIT)


def _grad_is_none_after_backward():
    """Gradients are the engine's: `.grad` stays None, so nothing is added twice."""
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        one_backward(model, dist.get_rank(), 0)
        assert all(p.grad is None for p in model.parameters())


def test_backward_leaves_no_gradient_on_the_parameters():
    run_ranks(_grad_is_none_after_backward, 2, timeout=LIMIT)


def _captured(layer):
    """A loss on an activation that a hook took from inside one block, and on nothing else."""

    def act(model, rank, step):
        taken = []
        handle = model.layers[layer].up.register_forward_hook(lambda _m, _args, output: taken.append(output))
        model(inputs(rank, step))
        handle.remove()
        loss = loss_of(taken[0])
        loss.backward()
        return [loss.detach()]

    assert_exact_or_refused(Tower, act)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_loss_on_an_activation_from_inside_a_block_is_exact_or_refused(layer):
    run_ranks(_captured, 2, layer, timeout=LIMIT)


def _captured_everywhere():
    """Distillation: a loss on the inner activations of all blocks, and none on the output."""

    def act(model, rank, step):
        taken = []
        handles = [
            layer.up.register_forward_hook(lambda _m, _args, output: taken.append(output)) for layer in model.layers
        ]
        model(inputs(rank, step))
        for handle in handles:
            handle.remove()
        loss = sum(loss_of(activation) for activation in taken)
        loss.backward()
        return [loss.detach()]

    assert_exact_or_refused(Tower, act)


def test_a_loss_on_the_inner_activations_of_all_blocks_is_exact_or_refused():
    run_ranks(_captured_everywhere, 2, timeout=LIMIT)


# Writes to what a block has returned


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


def _writes_to_outputs(min_numel):
    def one_backward_in_rows(model, rank, step):
        loss = loss_of(model(inputs(rank, step, (2, 5, 3))).mul_(1.1))
        loss.backward()
        return [loss.detach()]

    before, direct.MIN_NUMEL = direct.MIN_NUMEL, min_numel
    try:
        for kind in ("fresh", "view", "slice", "view of a part"):
            assert_stages_match(lambda kind=kind: Writing(kind), one_backward_in_rows)
    finally:
        direct.MIN_NUMEL = before


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


def _hands_on_views():
    def one_backward_in_rows(model, rank, step):
        loss = loss_of(model(inputs(rank, step, (2, 5, 3))))
        loss.backward()
        return [loss.detach()]

    assert_stages_match(Handing, one_backward_in_rows)


def test_a_block_may_return_views_of_what_it_was_given():
    run_ranks(_hands_on_views, 2, timeout=LIMIT)


@pytest.mark.parametrize("min_numel", [0, 2**16], ids=["direct", "small"])
def test_what_a_block_returns_may_be_written_to(min_numel):
    run_ranks(_writes_to_outputs, 2, min_numel, timeout=LIMIT)
