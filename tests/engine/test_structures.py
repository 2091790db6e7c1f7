"""World sizes, parameter shapes and dtypes, and models of unusual structure."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import ALL_STAGES, SETTINGS, assert_like_plain_torch, build_seeded, sgd, weights_of
from tests.tiers import more


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
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


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
    assert_like_plain_torch(BUILDERS[name], one_backward)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 3, *more(5)])
@ranks("num_ranks")
def test_world_sizes_that_divide_nothing(num_ranks):
    for name in ("blocks", "a linear", "odd shapes", "an odd root"):
        assert_like_plain_torch(BUILDERS[name], one_backward)


@ranks(3)
def test_units_larger_than_the_bucket():
    """Reductions in many pieces, since the staging buffer holds only a part of a unit."""
    assert_like_plain_torch(lambda: Tower(2, width=64), one_backward, bucket_nbytes=4096)


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

    first = None
    for stage in ALL_STAGES:
        model = build_seeded(build)
        reference = build_seeded(build)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        engine = engine_of(hf_zero.shard(model, stage=stage, **SETTINGS))
        optimizer = hf_zero.ShardedOptimizer(engine, sgd([p for p in model.parameters() if p.requires_grad]))
        assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
        one_backward(model, dist.get_rank(), 0)
        for rank in range(2):
            one_backward(reference, rank, 0)
        for name, p in reference.named_parameters():
            if p.requires_grad:
                bound = 2.0**-6 if p.dtype is torch.bfloat16 else 2e-5
                found = hf_zero.ShardedModel(engine.model).full_grad(name)
                wanted = p.grad.float() / 2
                error = (found.float() - wanted).abs().max()
                assert error <= bound * wanted.abs().max(), f"stage {stage}: {name}: {error}"
        optimizer.step()
        weights = weights_of(model)
        assert torch.equal(weights["layers.0.table"], torch.arange(WIDTH))
        first = first or weights
        assert all(torch.equal(weights[name], first[name]) for name in weights), f"stage {stage}"


@ranks(2)
def test_double_precision_stays_double():
    """The sum over the ranks keeps fp64's digits: 1e-12 is out of reach for what passed through fp32."""
    for stage in ALL_STAGES:
        model, reference = build_seeded(Tower).double(), build_seeded(Tower).double()
        engine = engine_of(hf_zero.shard(model, stage=stage, **SETTINGS))
        loss_of(model(inputs(dist.get_rank(), 0).double())).backward()
        for rank in range(2):
            loss_of(reference(inputs(rank, 0).double())).backward()
        for name, p in reference.named_parameters():
            torch.testing.assert_close(
                hf_zero.ShardedModel(engine.model).full_grad(name).double(),
                p.grad / 2,
                rtol=1e-12,
                atol=1e-14,
                msg=f"stage {stage}: {name}",
            )


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
        found = dict(model.named_buffers())
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), f"stage {stage}: {name}: is not rank 0's"
        assert model.absent is None


@ranks(2)
def test_running_statistics_are_updated_by_the_forward():
    def build():
        return nn.Sequential(nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))

    for stage in ALL_STAGES:
        model, reference = build_seeded(build), build_seeded(build)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        for step in range(2):
            one_backward(model, dist.get_rank(), step)
            one_backward(reference, dist.get_rank(), step)
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[name], buffer)


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
            return self.exact(self.rough(x).float()).to(x.dtype)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PartInFull.Part() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


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
        assert all(torch.equal(weights[a][name], weights[b][name]) for name in weights[a]), f"stages {a} and {b}"
    for name, weight in weights[0].items():
        assert torch.allclose(weight.float(), weights[2][name].float(), rtol=1e-2, atol=1e-4), name
