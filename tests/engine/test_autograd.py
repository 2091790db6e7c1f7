"""Ways into autograd other than `loss.backward()`, hooks of the user, gradients that are read, and `torch.func`: what
plain torch gives, or a refusal."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import hf_zero
from hf_zero.engine import direct
from hf_zero.engine.opaque import is_opaque
from hf_zero.errors import LifecycleError, UnsupportedError
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Tower, inputs, loss_of, one_backward, one_loss, through
from tests.engine.reference import (
    ALL_STAGES,
    TOLERANCE,
    assert_away,
    assert_equal_weights,
    assert_exact_or_refused,
    assert_like_plain_torch,
    build_seeded,
    reference_gradients,
    sgd,
    sharded,
    train_reference,
)


def other_loss(model, rank, step):
    return loss_of(model(inputs(rank, step, salt=1)))


def grad_of_parameters(model, rank, step):
    """This rank's own gradients, by `torch.autograd.grad`; then an ordinary backward."""
    grads = torch.autograd.grad(other_loss(model, rank, step), list(model.parameters()))
    return [*(grad.norm() for grad in grads), one_loss(model, rank, step)]


def grad_of_some_parameters(model, rank, step):
    loss = other_loss(model, rank, step)
    chosen = [model.layers[1].up.weight, model.layers[3].norm.bias, model.embed.weight]
    grads = torch.autograd.grad(loss, chosen, retain_graph=True)
    return [loss, *(grad.norm() for grad in grads)]


def grad_of_inputs(model, rank, step):
    x = inputs(rank, step, salt=1).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(x)), x)
    return [grad.norm(), grad[0, 0], one_loss(model, rank, step)]


def grad_of_activation(model, rank, step):
    """Backward stops in the middle of the model."""
    taken = []
    handle = model.layers[1].register_forward_hook(lambda _m, _args, output: taken.append(output))
    loss = other_loss(model, rank, step)
    handle.remove()
    (grad,) = torch.autograd.grad(loss, taken[0])
    return [grad.norm(), one_loss(model, rank, step)]


def backward_into_inputs(model, rank, step):
    """`backward(inputs=...)` accumulates into the named leaves only."""
    x = inputs(rank, step, salt=1).requires_grad_()
    loss_of(model(x)).backward(inputs=[x, model.layers[2].up.weight, model.head.bias])
    return [x.grad.norm(), one_loss(model, rank, step)]


def several_roots(model, rank, step):
    output = model(inputs(rank, step))
    first, second = loss_of(output), output.abs().mean()
    torch.autograd.backward([first, second], [torch.tensor(0.5), torch.tensor(2.0)])
    return [first.detach(), second.detach()]


def gradient_given_by_hand(model, rank, step):
    """Half of a pipeline: the gradient of the output comes from elsewhere."""
    output = model(inputs(rank, step))
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return output.detach().sum()


def output_in_two_parts(model, rank, step):
    """The graph is cut at the output, and the loss works on a leaf of its own."""
    output = model(inputs(rank, step))
    leaf = output.detach().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    output.backward(leaf.grad)
    return loss.detach()


def two_graphs_in_order(model, rank, step):
    first, second = one_loss(model, rank, step), other_loss(model, rank, step)
    first.backward()
    return second


def full_backward_hooks(model, rank, step):
    """Those that see the gradients of modules, and those that change them."""
    seen = []

    def record(_module, grad_input, grad_output):
        seen.extend(grad.abs().sum() for grad in (*grad_input, *grad_output) if grad is not None)

    middle = model.layers[2]
    handles = [layer.register_full_backward_hook(record) for layer in model.layers]
    handles.append(model.layers[1].register_full_backward_pre_hook(lambda _m, grads: tuple(g * 2 for g in grads)))
    handles.append(middle.up.register_full_backward_hook(record))
    handles.append(middle.register_full_backward_hook(lambda _m, grads, _out: tuple(g * 0.5 for g in grads)))
    losses = one_backward(model, rank, step)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2 * (len(model.layers) + 1)
    return losses + seen


def retained_gradients_of_activations(model, rank, step):
    kept = []

    def keep(_module, _args, output):
        output.retain_grad()
        kept.append(output)

    handles = [layer.register_forward_hook(keep) for layer in model.layers]
    losses = one_backward(model, rank, step)
    for handle in handles:
        handle.remove()
    return losses + [hidden.grad.norm() for hidden in kept]


@pytest.mark.direct
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
        two_graphs_in_order,
        full_backward_hooks,
        retained_gradients_of_activations,
    ],
)
@ranks(2)
def test_autograd_gives_what_plain_torch_gives(act):
    assert_like_plain_torch(Tower, act, exact=False)


# Hooks


def tensor_hooks(model):
    return [
        model.layers[1].up.weight.register_hook(lambda grad: grad * 3),
        model.layers[2].down.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
        model.embed.weight.register_hook(lambda grad: -grad),
    ]


def halve_gradient(param) -> None:
    param.grad.mul_(0.5)


def accumulate_hooks(model):
    params = model.layers[1].up.weight, model.head.bias
    return [p.register_post_accumulate_grad_hook(halve_gradient) for p in params]


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


@pytest.mark.direct
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

    assert_like_plain_torch(build)

    def act(model, rank, step):
        handles = hooks(model)
        losses = one_backward(model, rank, step)
        for handle in handles:
            handle.remove()
        return losses

    assert_like_plain_torch(Tower, act)


@pytest.mark.direct
@ranks(2)
def test_a_loss_on_nothing_but_activations_from_inside_of_blocks_is_exact_or_refused():
    for chosen in ([0], [1], [3], [0, 1, 2, 3]):

        def act(model, rank, step, chosen=chosen):
            taken = []
            handles = [
                model.layers[index].up.register_forward_hook(lambda _m, _args, output: taken.append(output))
                for index in chosen
            ]
            model(inputs(rank, step))
            for handle in handles:
                handle.remove()
            return sum(loss_of(activation) for activation in taken)

        assert_exact_or_refused(Tower, act)


# Views, and writes in place


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


@pytest.mark.direct
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
        return through(self.layers, self.embed(x))


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


@pytest.mark.parametrize("goes_directly", [pytest.param(True, marks=pytest.mark.direct), False])
@ranks(2)
def test_a_block_may_return_views_and_what_it_returns_may_be_written_to(goes_directly):
    assert (direct.MIN_NUMEL == 0) is goes_directly

    def written(model, rank, step):
        return loss_of(model(inputs(rank, step, (2, 5, 3))).mul_(1.1))

    for kind in ("fresh", "view", "slice", "view of a part"):
        assert_like_plain_torch(lambda kind=kind: Writing(kind), written)
    assert_like_plain_torch(Handing, lambda model, rank, step: loss_of(model(inputs(rank, step, (2, 5, 3)))))
    assert_like_plain_torch(Bare, two_graphs_in_order, exact=False)


# Gradients that are not stepped with, or not given


@pytest.mark.direct
@ranks(2)
def test_gradients_taken_by_autograd_grad_are_not_stepped_with():
    """Gradients taken by `torch.autograd.grad` alone are the caller's: a step after them changes nothing."""
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(Tower, stage)
        before = weights_of(model)
        torch.autograd.grad(one_loss(model, dist.get_rank(), 0), list(model.parameters()))
        optimizer.step()
        assert_away(model, engine)
        assert_equal_weights(weights_of(model), before, f"stage {stage}", exact=True)


@pytest.mark.direct
@ranks(2)
def test_double_backward_is_exact_or_refused_with_a_reason():
    """A gradient penalty on the parameters' gradients would need gathers that no rank can foresee. That of a critic
    differentiates the gradient of its inputs."""

    def penalty(model, rank, step):
        x = inputs(rank, step).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        return grad.square().sum()

    _, clean = train_reference(Tower, num_steps=1)
    wanted = reference_gradients(build_seeded(Tower), penalty)["layers.1.up.weight"]
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(Tower, stage)
        with pytest.raises(UnsupportedError, match="double backward"):
            one_loss(model, dist.get_rank(), 0).backward(create_graph=True)
        optimizer.zero_grad()
        if stage >= 2:
            with pytest.raises(UnsupportedError, match="double backward"):
                penalty(model, dist.get_rank(), 0)
        else:
            penalty(model, dist.get_rank(), 0).backward()
            found = hf_zero.ShardedModel(engine.model).full_grad("layers.1.up.weight")
            torch.testing.assert_close(found, wanted, **TOLERANCE)
        optimizer.zero_grad()
        one_backward(model, dist.get_rank(), 0)
        optimizer.step()
        assert_equal_weights(weights_of(model), clean, f"stage {stage}: the step after a refusal")


@pytest.mark.direct
@ranks(2)
def test_a_backward_through_a_forward_of_before_the_step_is_refused():
    """The parameters have new values: torch refuses that where its own optimizers have written them. What the step
    left out may still be differentiated."""
    for stage in ALL_STAGES:
        model, _, optimizer = sharded(Tower, stage)
        loss = one_loss(model, dist.get_rank(), 0)
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


@pytest.mark.direct
@ranks(2)
def test_full_grad_is_the_average_over_the_ranks():
    wanted = reference_gradients(build_seeded(Tower))
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        handle = hf_zero.ShardedModel(engine.model)
        assert handle.full_grad("head.bias") is None
        one_backward(model, dist.get_rank(), 0)
        for name, average in wanted.items():
            torch.testing.assert_close(handle.full_grad(name), average, **TOLERANCE)
        with pytest.raises(KeyError):
            handle.full_grad("no such name")


# Reads of `param.grad` between backward and step, where hf_zero has none: the first one warns.


def _strict(stage: int) -> tuple[nn.Module, hf_zero.ShardedOptimizer]:
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=stage, strict=True)
    return model, hf_zero.ShardedOptimizer(model, sgd(model.parameters()))


@pytest.mark.quick
@pytest.mark.parametrize("stage", ALL_STAGES)
def test_the_first_read_warns_with_what_works_and_later_ones_do_not(stage):
    model, optimizer = _strict(stage)
    one_backward(model, 0, 0)
    # an optimizer that is refused does not warn as well
    with warnings.catch_warnings(), pytest.raises(LifecycleError, match="holds parameters of a sharded model"):
        warnings.simplefilter("error")
        sgd(model.parameters()).step()
    with pytest.warns(UserWarning, match=r"param.register_hook\(...\).*sharded.full_grad\(name\)") as caught:
        assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    assert len(caught) == 1 and caught[0].filename == __file__
    optimizer.step()
    one_backward(model, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(model.parameters()).grad is None


@pytest.mark.quick
@pytest.mark.parametrize("goes_directly", [False, pytest.param(True, marks=pytest.mark.direct)])
@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_training_that_reads_no_gradient_is_not_warned_and_keeps_its_classes(stage, goes_directly):
    """Where gradients do not go directly, autograd puts them into `.grad`, and the engine itself reads them there."""
    model, optimizer = _strict(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            losses = [loss_of(model(inputs(0, step, salt=salt))) for salt in range(2)]
            for loss in losses:  # two backwards without a forward between them
                loss.backward()
            if stage < 3:
                assert type(copy.deepcopy(model.layers[0].up.weight)) is nn.Parameter
            assert not any(map(is_opaque, model.parameters()))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())  # behind the step
            optimizer.zero_grad()
    with hf_zero.gathered(model):
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert torch.isfinite(model.layers[0].up.weight).all()


# Transforms of `torch.func`, and `torch.compile` of the whole model


def per_sample_gradients(model) -> dict[str, torch.Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of_one(params, row):
        return functional_call(model, params, (row[None],)).square().sum()

    return vmap(grad(loss_of_one), in_dims=(None, 0))(params, inputs(0, 0))


def input_derivative(model) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs(0, 0)
    return jvp(model, (given,), (torch.ones_like(given),))


@pytest.mark.parametrize("stage", [2, 3])
def test_transforms_inside_gathered_are_exact_and_others_are_refused(stage):
    wanted, derivative = per_sample_gradients(build_seeded(Tower)), input_derivative(build_seeded(Tower))
    model, _ = _strict(stage)
    with hf_zero.gathered(model):
        found = per_sample_gradients(model)
        assert all(map(torch.equal, input_derivative(model), derivative))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    reason = r"a transform of torch.func .* inside `with hf_zero.gathered\(model\):`"
    for transform in (input_derivative, lambda model: vmap(model)(inputs(0, 0)[:, None])) if stage == 3 else ():
        with pytest.raises(LifecycleError, match=reason):
            transform(model)
    one_backward(model, 0, 0)  # as ever


def test_a_model_that_is_compiled_whole_at_stage_3_names_the_way():
    with pytest.raises(RuntimeError, match=r"torch.compile\(model\) reads .* hf_zero.compile_blocks\(model\)"):
        torch.compile(_strict(3)[0], backend="eager")(inputs(0, 0))
