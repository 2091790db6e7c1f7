"""What a parameter is while its values are away: everything but its values. A use of them is refused by name."""

import copy
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.away import AwayParameter
from hf_zero.errors import HfZeroError, LifecycleError, NonFiniteError
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward, one_loss, through
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_equal_weights,
    assert_like_plain_torch,
    build_seeded,
    sharded,
    train_reference,
)


class Odd(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.row = nn.Parameter(torch.ones(1, 1, 1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, hidden):
        return hidden @ self.weight * self.number * self.single * self.row[0, 0] * self.low.float() * self.frozen


def odd_tower() -> Tower:
    return Tower(3, block=Odd)


def facts(p: torch.Tensor):
    return (
        id(p),
        p.shape,
        p.dtype,
        p.device,
        p.requires_grad,
        p.is_leaf,
        p.numel(),
        p.dim(),
        p.element_size(),
        p.nbytes,
        p.layout,
        len(p) if p.dim() else None,
        p.is_floating_point(),
    )


@pytest.mark.quick
@ranks(2)
def test_parameters_keep_identity_shape_dtype_and_device():
    for stage in ALL_STAGES:
        model = build_seeded(odd_tower)
        params = dict(model.named_parameters())
        before = {name: facts(p) for name, p in params.items()}
        hf_zero.shard(model, stage=stage, **SETTINGS)
        for moment in ("after sharding", "after training"):
            found = dict(model.named_parameters())
            assert found.keys() == params.keys()
            assert {name: facts(p) for name, p in found.items()} == before, f"stage {stage} {moment}"
            loss_of(model(inputs(dist.get_rank(), 0))).backward()


READS = {
    "arithmetic": lambda p: p * 2,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "lerp_": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
    "_foreach_lerp_": lambda p: torch._foreach_lerp_([torch.zeros(p.shape)], [p], 0.5),
    "linear": lambda p: F.linear(torch.ones(p.shape[-1:]) if p.dim() else torch.ones(()), p),
    "out": lambda p: torch.add(torch.zeros(p.shape), 1, out=p),
    "to": lambda p: p.to(torch.float64),
    "item": lambda p: p.sum().item(),
    "bool": lambda p: bool(p),
    "numpy": lambda p: np.asarray(p),
    "address": lambda p: p.data_ptr(),
    "torch.ops": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "autograd.Function": lambda p: Doubled.apply(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save([p], io.BytesIO()),
    "safetensors": lambda p: safetensors.torch.save({"p": p}),
    "deepcopy of a list": lambda p: copy.deepcopy([p]),
    "to_dlpack": lambda p: torch.from_dlpack(p),
    "share_memory_": lambda p: p.share_memory_(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "average": lambda p: torch.optim.swa_utils.AveragedModel(held(torch.zeros(p.shape))).update_parameters(held(p)),
    "prune": lambda p: prune.l1_unstructured(held(p), "p", 0.5),
}


def held(p: torch.Tensor) -> nn.Module:
    """A module that has this parameter alone."""
    module = nn.Module()
    module.p = p if isinstance(p, nn.Parameter) else nn.Parameter(p)
    return module


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        return param * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.quick
@ranks(2)
def test_any_read_raises_with_the_parameters_name():
    model, _, _ = sharded(odd_tower, 3)
    silent = []
    for name, p in model.named_parameters():
        for read, act in READS.items():
            try:
                act(p)
                silent.append(f"{read} of {name}")
            except LifecycleError as error:
                assert str(error).startswith(f"{name}: is used ("), str(error)
                assert "with hf_zero.gathered" in str(error) and "sharded.named_shards()" in str(error)
    assert not silent, silent


@pytest.mark.quick
@ranks(2)
def test_questions_that_need_no_value_are_answered():
    """What asks for no value is answered, and makes no tensor that is away itself."""
    model, _, _ = sharded(odd_tower, 3)
    weight = model.layers[0].weight
    assert len(weight) == WIDTH and weight.stride() and weight.nbytes == 4 * weight.numel() and weight.is_leaf
    assert weight.grad is None and weight.requires_grad and weight in {weight} and dir(weight)
    for made in (torch.zeros_like(weight), weight.new_ones(weight.shape), torch.empty_like(weight)):
        assert type(made) is torch.Tensor and made.shape == weight.shape
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    assert node.variable is weight
    assert "values are sharded" in f"{weight}" and "values are sharded" in repr(weight)
    assert isinstance(weight, nn.Parameter) and type(weight).__name__ == "Parameter"
    weight.requires_grad_(False).requires_grad_(True)
    with hf_zero.gathered(weight):
        assert type(weight) is nn.Parameter
        other = copy.deepcopy(weight)
    assert type(other) is nn.Parameter and torch.equal(other, build_seeded(odd_tower).layers[0].weight)


WRITES = {
    "fill_": lambda p: p.data.fill_(1.0),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.data.mul_(2),
    "zero_": lambda p: p.zero_(),
    "normal_": lambda p: nn.init.normal_(p),
    "index": lambda p: p.__setitem__(..., 1),
    "assignment": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 2),
}


@pytest.mark.quick
@ranks(2)
@torch.no_grad()
def test_any_write_raises_with_the_parameters_name():
    model, _, _ = sharded(odd_tower, 3)
    wanted = weights_of(model)
    for name, p in model.named_parameters():
        for act in WRITES.values():
            with pytest.raises(LifecycleError, match=f"^{name}: is used"):
                act(p)
    assert_equal_weights(weights_of(model), wanted, "after writes", exact=True)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.quick
@ranks(2)
def test_state_dict_outside_of_gathered_raises():
    wanted = _state(build_seeded(Tower))
    model, _, optimizer = sharded(Tower, 3)

    def refused():
        for module in (model, model.layers, model.layers[1], model.layers[1].up, model.head):
            with pytest.raises(LifecycleError, match="gathered"):
                module.state_dict()
        with pytest.raises(LifecycleError):
            model.load_state_dict(wanted)

    refused()
    loss = one_loss(model, dist.get_rank(), 0)
    with pytest.raises(LifecycleError):
        model.state_dict()
    loss.backward()
    refused()
    optimizer.zero_grad()
    with hf_zero.gathered(model):
        found = _state(model)
    assert_equal_weights(found, wanted, "gathered", exact=True)
    refused()
    # a part whose parameters are all whole
    with hf_zero.gathered(model.layers[1]):
        found = {f"layers.1.{name}": tensor for name, tensor in _state(model.layers[1]).items()}
    part = {name: tensor for name, tensor in wanted.items() if name.startswith("layers.1.")}
    assert_equal_weights(found, part, "a gathered part", exact=True)


@pytest.mark.quick
@ranks(2)
def test_the_state_dict_of_one_linear_raises():
    """A model without blocks keeps its root whole between forward and backward, yet never hands it out."""
    model, _, optimizer = sharded(lambda: nn.Linear(3, 2), 3)
    for act in (lambda: one_backward(model, dist.get_rank(), 0), optimizer.step):
        act()
        with pytest.raises(LifecycleError):
            model.state_dict()


@pytest.mark.quick
@ranks(2)
def test_state_dict_is_whole_where_parameters_are():
    for stage in (0, 1, 2):
        model, _, _ = sharded(Tower, stage)
        assert_equal_weights(_state(model), _state(build_seeded(Tower)), f"stage {stage}", exact=True)


@pytest.mark.quick
@pytest.mark.support("Copy of a sharded model", area="Models in one process", stages=ALL_STAGES, refused=True)
@ranks(2)
def test_deepcopy_and_pickle_are_refused():
    for stage in ALL_STAGES:
        model, _, _ = sharded(Tower, stage)
        with pytest.raises(HfZeroError, match="copied"):
            copy.deepcopy(model)
        with pytest.raises(HfZeroError, match="pickled"):
            pickle.dumps(model)
        with pytest.raises(HfZeroError, match="a part of it cannot be copied"):
            copy.deepcopy(model.layers[1])


@pytest.mark.quick
@ranks(2)
def test_sharding_twice_or_moving_a_model_to_where_it_is_changes_nothing():
    """`.to()` to where the model is already is what many libraries do in passing. Other settings are refused."""
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        wanted = weights_of(model)
        assert engine_of(hf_zero.shard(model, stage=stage, **SETTINGS)) is engine
        assert engine_of(model) is engine
        for others in ({"stage": (stage + 1) % 4}, {"stage": stage, "compute_dtype": torch.bfloat16}):
            with pytest.raises(LifecycleError, match="already sharded"):
                hf_zero.shard(model, **others, **SETTINGS)
        model.to("cpu")
        model.to(torch.float32)
        model.train().eval()
        model.requires_grad_(True)
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}", exact=True)
    assert engine_of(Tower()) is None


# A module outside of the blocks that has what a block has


class TiedAfter(Tower):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 2 * WIDTH)
        self.out.weight = self.layers[1].up.weight

    def forward(self, x):
        return self.out(through(self.layers, self.embed(x)))


class BorrowedModule(Tower):
    def __init__(self):
        super().__init__()
        self.again = self.layers[1].down

    def forward(self, x):
        hidden = through(self.layers, self.embed(x))
        return self.head(self.again(F.gelu(torch.cat([hidden, hidden], dim=-1))))


@pytest.mark.parametrize("build", [TiedAfter, BorrowedModule])
@ranks(2)
def test_what_a_module_outside_of_the_blocks_has_too_is_whole_there(build):
    assert_like_plain_torch(build)


# Functional uses


class Functional(Tower):
    """`use` is what its forward does with the hidden state and the parameters of blocks."""

    def __init__(self, use):
        super().__init__(4)
        self.use = use

    def forward(self, x):
        hidden = self.use(self, through(self.layers[:3], self.embed(x)))
        return self.head(self.layers[3](hidden))


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
    "without gradients": _counted,
    "item": lambda model, hidden: hidden * float(first(model)[0] > 0.5),
}


@pytest.mark.quick
@ranks(2)
def test_a_functional_use_outside_of_the_block_is_refused_by_name():
    def nothing(_model, hidden):
        return hidden

    rank = dist.get_rank()
    _, wanted = train_reference(lambda: Functional(nothing), num_steps=1)
    for name, use in USES.items():
        model, _, optimizer = sharded(lambda use=use: Functional(use), 3)
        for _ in range(2):
            with pytest.raises(LifecycleError, match=r"^layers\.[02]\.(norm|up)\.weight: is used \("):
                model(inputs(rank, 0))
        model.use = nothing
        one_backward(model, rank, 0)
        optimizer.step()
        assert_equal_weights(weights_of(model), wanted, f"after the refusal of {name}")


@ranks(2)
def test_no_step_is_taken_on_a_functional_use_behind_the_block():
    """Until the next block begins, a block's parameters can be read, for hooks on it. In backward they are NaN."""
    model, _, optimizer = sharded(
        lambda: Functional(lambda model, hidden: hidden * model.layers[2].norm.weight.pow(2)), 3
    )
    wanted = weights_of(model)
    one_backward(model, dist.get_rank(), 0)
    with pytest.raises(NonFiniteError, match="parameter that is used outside of the block after its forward"):
        optimizer.step()
    assert_equal_weights(weights_of(model), wanted, "after the refusal", exact=True)


@ranks(2)
def test_a_first_forward_in_inference_mode():
    """There, giving a parameter its data is an operation like any other."""
    model = build_seeded(Tower)
    with torch.no_grad():
        wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, **SETTINGS)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs(0, 0)), wanted)


@ranks(2)
def test_shapes_and_dtypes_of_parameters_that_are_away_may_be_looked_at():
    """Looking at shapes, dtypes and devices reads no value."""

    def use(model, hidden):
        weight = first(model)
        like = torch.zeros_like(weight) + weight.new_ones(weight.shape)
        return hidden.to(weight.dtype).view(-1, weight.numel()).to(weight.device) * like

    assert_like_plain_torch(lambda: Functional(use))


class Own(nn.Parameter):
    """A subclass of Parameter with attributes, as quantizers have them."""


class WithOwn(Block):
    def __init__(self, width: int = WIDTH):
        super().__init__(width)
        self.scale = Own(torch.full((width,), 0.7), requires_grad=False)
        self.scale.codes = torch.ones(3)

    def forward(self, hidden):
        assert type(self.scale) is Own
        return super().forward(hidden) * self.scale


@ranks(2)
def test_a_subclass_of_parameter_keeps_its_class_and_attributes():
    model = build_seeded(lambda: Tower(block=WithOwn))
    wanted = model(inputs(0, 0))
    hf_zero.shard(model, stage=3, **SETTINGS)
    torch.testing.assert_close(model(inputs(0, 0)), wanted)
    for layer in model.layers:
        assert isinstance(layer.scale, Own) and isinstance(layer.scale, AwayParameter)
        assert type(layer.scale).__name__ == "Own" and layer.scale.codes.sum() == 3
        with pytest.raises(LifecycleError, match=r"^layers\.\d\.scale: is used"):
            layer.scale.sum()
    with hf_zero.gathered(model):
        assert all(type(layer.scale) is Own for layer in model.layers)
    hf_zero.ShardedModel(model).unshard()
    assert all(type(layer.scale) is Own for layer in model.layers)
