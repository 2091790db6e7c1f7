"""World sizes, parameter shapes and dtypes, frozen and unused parameters, and models of unusual structure."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward, one_loss, through
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_equal_weights,
    assert_like_plain_torch,
    build_seeded,
    reference_gradients,
    sgd,
    sharded,
    train_reference,
    train_sharded,
)
from tests.tiers import more


pytestmark = pytest.mark.direct


class OddShapes(nn.Module):
    """0-d, one-element, empty, and non-contiguous parameters in one block."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.nothing = nn.Parameter(torch.empty(0))
        self.weight = nn.Parameter(torch.randn(width, width).t() * 0.3)
        self.strided = nn.Parameter(torch.randn(width, 2 * width)[:, ::2] * 0.3)

    def forward(self, hidden):
        grown = torch.cat([hidden, hidden @ self.empty.t()], dim=-1) + self.nothing.sum()
        return hidden + self.scale * torch.tanh(grown @ self.weight + self.shift) @ self.strided


class OddRoot(Tower):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.empty = nn.Parameter(torch.empty(2, 0, 3))

    def forward(self, x):
        return super().forward(x) * self.temperature + self.empty.sum()


class ManyEmbeddings(nn.Module):
    """The root is larger than all blocks together."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(211, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 211)

    def forward(self, x):
        hidden = self.embed((x.abs() * 50).long() % 211).mean(dim=1)
        return self.head(through(self.layers, hidden))


class UnequalBlocks(Tower):
    """Blocks of sizes and structures that differ: a slot fits the largest."""

    def __init__(self):
        super().__init__(5)
        self.layers[1] = nn.Linear(WIDTH, WIDTH)
        self.layers[2] = nn.Sequential(nn.Linear(WIDTH, 9 * WIDTH), nn.Tanh(), nn.Linear(9 * WIDTH, WIDTH))
        self.layers[4] = nn.Identity()


class CalledByForward(Tower):
    """Calls `forward` of its blocks, and of the module around them, which runs none of their hooks."""

    def __init__(self):
        super().__init__()
        self.around = Tower(3, width=WIDTH)
        self.around.embed, self.around.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.layers:
            hidden = block.forward(hidden)
        return self.head(self.around.forward(hidden))


class ParameterListModel(nn.Module):
    """Parameters in lists of parameters rather than in modules."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, 3) * 0.3) for _ in range(3))
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(3))})

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.table["a"] + self.table["b"]
        return x


BUILDERS = {
    "blocks": Tower,
    "a linear": lambda: nn.Linear(3, 2),
    "one number": lambda: nn.Linear(3, 1, bias=False),
    "a sequential": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)),
    "nested sequentials": lambda: nn.Sequential(
        nn.Linear(3, WIDTH),
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))),
        nn.Linear(WIDTH, 2),
    ),
    "odd shapes": lambda: Tower(3, block=OddShapes),
    "an odd root": OddRoot,
    "a large root": ManyEmbeddings,
    "unequal blocks": UnequalBlocks,
    "called by forward": CalledByForward,
    "lists of parameters": ParameterListModel,
}


@pytest.mark.full("more cases", after=6)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", BUILDERS)
@ranks(2)
def test_structures_train_as_in_plain_torch(name):
    assert_like_plain_torch(BUILDERS[name])


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 3, *more(5)])
@ranks("num_ranks")
def test_world_sizes_that_divide_nothing(num_ranks):
    for name in ("blocks", "a linear", "odd shapes", "an odd root"):
        assert_like_plain_torch(BUILDERS[name])


@ranks(3)
def test_units_larger_than_the_bucket():
    """Reductions in many pieces, since the staging buffer holds only a part of a unit."""
    assert_like_plain_torch(lambda: Tower(2, width=64), bucket_nbytes=4096)


class MixedBlock(nn.Module):
    """fp32, bf16 and fp64 parameters, and an integer table."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.plain = nn.Linear(width, width)
        self.high = nn.Linear(width, width, dtype=torch.float64)
        self.table = nn.Parameter(torch.arange(width), requires_grad=False)

    def forward(self, hidden):
        hidden = hidden[:, self.table]
        hidden = hidden + self.low(hidden.bfloat16()).float()
        return hidden + self.high(torch.tanh(self.plain(hidden)).double()).float()


@pytest.mark.support("Several dtypes in one block", area="Precision", stages=ALL_STAGES)
@ranks(2)
def test_parameters_of_several_dtypes_in_one_unit():
    """Gradients of bf16 parameters are rounded once on each rank and once more at rest, so stages differ from the
    reference by bf16 rounding (2**-8 of the gradient) at most, and not among themselves."""

    def build():
        return Tower(3, block=MixedBlock)

    first, wanted = None, reference_gradients(build_seeded(build))
    for stage in ALL_STAGES:
        model, engine, optimizer = sharded(build, stage)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in build().parameters()]
        one_backward(model, dist.get_rank(), 0)
        for name, grad in wanted.items():
            bound = 2.0**-6 if grad.dtype is torch.bfloat16 else 2e-5
            error = (hf_zero.ShardedModel(engine.model).full_grad(name).float() - grad.float()).abs().max()
            assert error <= bound * grad.abs().max(), f"stage {stage}: {name}: {error}"
        optimizer.step()
        weights = weights_of(model)
        assert torch.equal(weights["layers.0.table"], torch.arange(WIDTH))
        first = first or weights
        assert_equal_weights(weights, first, f"stage {stage}", exact=True)


@ranks(2)
def test_double_precision_stays_double():
    """The sum over the ranks keeps fp64's digits: 1e-12 is out of reach for what passed through fp32."""

    def act(model, rank, step):
        return loss_of(model(inputs(rank, step).double()))

    wanted = reference_gradients(build_seeded(Tower).double(), act)
    for stage in ALL_STAGES:
        model, engine, _ = sharded(lambda: Tower().double(), stage)
        act(model, dist.get_rank(), 0).backward()
        for name, grad in wanted.items():
            found = hf_zero.ShardedModel(engine.model).full_grad(name)
            torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-14, msg=f"stage {stage}: {name}")


class Buffered(Tower):
    """Running statistics, counters, constants, and a buffer that is an expanded view."""

    def __init__(self):
        super().__init__(3)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("flags", torch.rand(WIDTH) > 0.5)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("hidden_table", torch.randn(2, 3), persistent=False)
        self.register_buffer("positions", torch.arange(5).expand(2, -1), persistent=False)
        self.register_buffer("rotation", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return super().forward(x) + self.statistics(self.embed(x) + self.offset * self.flags)[:, :2]


@ranks(2)
def test_buffers_are_whole_and_rank_0s():
    for stage in ALL_STAGES:
        torch.manual_seed(5)
        wanted = {name: buffer.clone() for name, buffer in Buffered().named_buffers()}
        torch.manual_seed(5 + dist.get_rank())
        model = Buffered()
        model.statistics.running_mean.fill_(dist.get_rank())
        model.count.fill_(3 + dist.get_rank())
        hf_zero.shard(model, stage=stage, **SETTINGS)
        assert_equal_weights(dict(model.named_buffers()), wanted, f"stage {stage}, rank 0's buffers", exact=True)
        assert model.absent is None


@ranks(2)
def test_a_model_without_parameters():
    for stage in ALL_STAGES:
        model = nn.Sequential(nn.Tanh(), nn.Softmax(dim=-1))
        engine = engine_of(hf_zero.shard(model, stage=stage, **SETTINGS))
        x = inputs(0, 0).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None and engine.param_infos() == []


class PartInFull(nn.Module):
    """Blocks with a layer that its authors want in fp32."""

    _keep_in_fp32_modules = ["exact"]

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.rough, self.exact = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.exact(self.rough(x).float()).to(x.dtype).tanh()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PartInFull.Part() for _ in range(3))

    def forward(self, x):
        return through(self.blocks, x).square().mean()


def _accumulates_in_two_dtypes(stage: int):
    torch.manual_seed(0)
    model = PartInFull()
    engine = hf_zero.shard(model, stage=stage, compute_dtype=torch.bfloat16)
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(4, 16, generator=generator).bfloat16()).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("num_ranks", (1, 2))
@ranks("num_ranks")
def test_a_block_of_two_dtypes_accumulates_at_every_stage(num_ranks):
    weights = [_accumulates_in_two_dtypes(stage) for stage in ALL_STAGES]
    for a, b in ((0, 1), (2, 3)):
        assert_equal_weights(weights[a], weights[b], f"stages {a} and {b}", exact=True)
    for name, weight in weights[0].items():
        assert torch.allclose(weight.float(), weights[2][name].float(), rtol=1e-2, atol=1e-4), name


# Parameters that do not train, beside or instead of those that do, and parameters that no batch reaches


# Which parameters train, by their names.
TRAINED = {
    "all but a unit": lambda name: not name.startswith("layers.1."),
    "the head": lambda name: name.startswith("head."),
    "one bias of a unit": lambda name: not name.startswith("layers.1.") or name == "layers.1.up.bias",
    "one bias": lambda name: name == "layers.2.down.bias",
    "the first bias": lambda name: name == "layers.0.norm.bias",
    "the blocks": lambda name: name.startswith("layers."),
}


def partly(trained: str) -> Tower:
    model = Tower()
    for name, param in model.named_parameters():
        param.requires_grad_(TRAINED[trained](name))
    return model


class LowRank(nn.Module):
    """A frozen block with a trainable low-rank addition, as LoRA has."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.base = Block(width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width) * 0.3)
        self.b = nn.Parameter(torch.randn(width, 2) * 0.3)

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.a.t() @ self.b.t()


def low_rank() -> Tower:
    model = Tower(4, block=LowRank)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


FROZEN = {"low rank": low_rank, **{name: partial(partly, name) for name in TRAINED}}


def with_gradients_of_the_inputs(model, rank, step):
    x = inputs(rank, step).requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return [loss.detach(), x.grad.abs().sum(), x.grad[0, 0]]


@pytest.mark.full("more cases", after=3)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", FROZEN)
@ranks(2)
def test_partly_frozen_models_train_as_in_plain_torch(name):
    assert_like_plain_torch(FROZEN[name], num_steps=3)
    if name in ("low rank", "the head"):
        assert_like_plain_torch(FROZEN[name], with_gradients_of_the_inputs)


@ranks(2)
def test_a_wholly_frozen_model_gives_the_gradients_of_its_inputs():
    for stage in ALL_STAGES:
        model = build_seeded(Tower).requires_grad_(False)
        x = inputs(0, 0).requires_grad_()
        wanted_output = model(x)
        (wanted,) = torch.autograd.grad(loss_of(wanted_output), x)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        for _ in range(2):
            x.grad = None
            loss_of(model(x)).backward()
            torch.testing.assert_close(x.grad, wanted)


class SometimesUsed(Tower):
    """The side block serves only some steps, and on some ranks."""

    def __init__(self):
        super().__init__(3)
        self.side = nn.Linear(WIDTH, 2)
        self.use_side = False

    def forward(self, x):
        hidden = through(self.layers, self.embed(x))
        return self.head(hidden) + (self.side(hidden) if self.use_side else 0)


def adamw(params):
    # eps far above rounding keeps the update smooth where gradients are nearly zero
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)


@ranks(2)
def test_parameters_used_now_and_then_are_left_alone_in_between():
    """Other blocks at every step, so that each parameter has a step count of its own; some that no rank calls."""

    def side(model, rank, step):
        model.use_side = step == 1 or (step == 3 and rank == 0)
        return one_loss(model, rank, step)

    def blocks(model, rank, step):
        model.order = [[0, 1], [1, 2, 3], [0, 3], [2]][step]
        return one_loss(model, rank, step)

    for make_optimizer in (sgd, adamw):
        assert_like_plain_torch(SometimesUsed, side, num_steps=5, make_optimizer=make_optimizer)
    assert_like_plain_torch(Tower, blocks, num_steps=4, make_optimizer=adamw)


@ranks(2)
def test_a_step_without_gradients_changes_nothing():
    _, wanted = train_reference(Tower, num_steps=1, make_optimizer=adamw)
    for stage in ALL_STAGES:
        model, _, optimizer = sharded(Tower, stage, adamw)
        before = weights_of(model)
        optimizer.step()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert float(norm) == 0.0
        assert_equal_weights(weights_of(model), before, f"stage {stage}: an empty step", exact=True)
        assert not optimizer.state or all(not state for state in optimizer.state.values())
        one_backward(model, dist.get_rank(), 0)
        optimizer.step()
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}: a real step afterwards is a first step")


@ranks(2)
def test_a_parameter_unfrozen_after_sharding_is_refused_at_the_step():
    for stage in ALL_STAGES:
        model, _, optimizer = sharded(FROZEN["all but a unit"], stage)
        model.layers[1].requires_grad_(True)
        one_backward(model, dist.get_rank(), 0)
        with pytest.raises(hf_zero.errors.LifecycleError, match="unfrozen"):
            optimizer.step()


@ranks(2)
def test_a_parameter_frozen_after_sharding_stays_as_it_is():
    def act(model, rank, step):
        if step == 1:
            model.layers[1].requires_grad_(False)
            model.layers[3].up.bias.requires_grad_(False)
        return one_loss(model, rank, step)

    assert_like_plain_torch(Tower, act, num_steps=3)


@dataclass
class Hidden:
    """What a block hands on, beside tensors, lists and dicts of them."""

    values: torch.Tensor
    owner: "Hidden | None" = None

    def __post_init__(self):
        self.owner = self  # as a cache that knows who holds it


class Plain(nn.Module):
    """A block without a norm: a norm's backward would read its weight, and find NaN."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Wrapping(Plain):
    """One that hands on a dataclass, and is given one."""

    def forward(self, hidden):
        return Hidden(super().forward(hidden.values if isinstance(hidden, Hidden) else hidden))


class Unwrapping(Tower):
    def __init__(self):
        super().__init__(block=Wrapping)
        self.layers.requires_grad_(False)

    def forward(self, x):
        return self.head(through(self.layers, self.embed(x)).values)


@ranks(2)
def test_gradients_through_frozen_blocks_are_right_or_refused():
    """Nothing of frozen blocks arrives in a backward that the engine could look at."""
    assert_like_plain_torch(Unwrapping)

    def build():
        model = Tower(block=Plain)
        model.layers.requires_grad_(False)
        return model

    def act(model, rank, step):  # a loss on what a hook has taken from inside the first block, and on nothing else
        taken = []
        handle = model.layers[0].up.register_forward_hook(lambda _m, _args, output: taken.append(output))
        model(inputs(rank, step))
        handle.remove()
        return loss_of(taken[0])

    assert_like_plain_torch(build, act, stages=(0, 1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # another block's values lie there
        train_sharded(build, act, 3, shared_memory=False)


# gloo's collectives know none of them, NCCL's know float8 alone
UNSENT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.bool, torch.complex64)


class Coded(nn.Module):
    """A block over frozen codes in dtypes that are not computed in; a buffer too."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.inner = Block(width)
        for index, dtype in enumerate(UNSENT):
            codes = torch.randint(0, 2, (width, width)).to(dtype)
            self.register_parameter(f"codes_{index}", nn.Parameter(codes, requires_grad=False))
        self.register_buffer("scale", torch.rand(()).to(torch.float8_e4m3fn))

    def forward(self, hidden):
        for index, dtype in enumerate(UNSENT):
            codes = getattr(self, f"codes_{index}")
            codes = (torch.view_as_real(codes)[..., 0] if dtype.is_complex else codes).float()
            hidden = hidden + 0.1 * self.scale.float() * hidden @ codes
        return self.inner(hidden)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.support("Frozen parameters in other dtypes than the compute dtype", area="Precision", stages=ALL_STAGES)
@pytest.mark.parametrize("shared_memory", [True, False])
@ranks(2)
def test_frozen_parameters_may_be_of_dtypes_that_are_not_sent_as_numbers(shared_memory):
    reference = build_seeded(lambda: Tower(2, block=Coded))
    wanted = {name: p.detach().clone() for name, p in reference.named_parameters()}
    losses = [loss_of(reference(inputs(rank, 0))).detach() for rank in range(2)]
    for stage in ALL_STAGES:
        torch.manual_seed(dist.get_rank())  # rank 0's values are everyone's
        model = Tower(2, block=Coded) if dist.get_rank() else build_seeded(lambda: Tower(2, block=Coded))
        hf_zero.shard(model, stage=stage, shared_memory=shared_memory, **SETTINGS)
        (loss,) = one_backward(model, dist.get_rank(), 0)
        torch.testing.assert_close(loss, losses[dist.get_rank()], msg=f"stage {stage}")
        with hf_zero.gathered(model):
            for name, p in model.named_parameters():
                assert p.dtype is wanted[name].dtype
                assert torch.equal(_bytes(p), _bytes(wanted[name])), f"stage {stage}: {name}"
