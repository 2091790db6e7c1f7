"""What user code writes to parameters beside the optimizer: it counts, or it raises, at every stage and dtype."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import Sample
from tests import models
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import Block, Tower, inputs, loss_of
from tests.engine.reference import ALL_STAGES, SETTINGS, assert_equal_weights, build_seeded, sgd
from tests.output import logged
from tests.training import Sharded, adamw


NAME = "layers.1.up.weight"  # its range is divided over the ranks


def load(model, p):
    model.load_state_dict({**model.state_dict(), NAME: torch.full_like(p, 0.25)})


WRITES = {
    "in place": lambda model, p: p.fill_(0.25),
    "data, in place": lambda model, p: p.data.copy_(torch.full_like(p, 0.25)),
    "another storage": lambda model, p: setattr(p, "data", torch.full_like(p, 0.25)),
    "state dict": load,
}


def trained(stage, dtype, **settings):
    model = build_seeded(Tower)
    engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=dtype, **SETTINGS, **settings))
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    take_step(model, optimizer, 0)
    return model, engine, optimizer


def take_step(model, optimizer, step):
    x = inputs(dist.get_rank(), step).to(model.head.weight.dtype)
    loss_of(model(x).float()).backward()
    optimizer.step()


def freeze(optimizer):
    for group in optimizer.param_groups:
        group.update(lr=0.0)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_what_is_written_between_steps_counts_where_parameters_are_whole(num_ranks, dtype):
    ways = [(stage, {}) for stage in (0, 1, 2)]
    ways += [(stage, {"offload": "optimizer"}) for stage in (1, 2) if dtype is None and num_ranks == 2]
    for stage, settings in ways:
        for kind, write in WRITES.items():
            model, engine, optimizer = trained(stage, dtype, **settings)
            before = {(s.name, s.start): s.tensor.clone() for s in engine.named_shards()}
            with torch.no_grad():
                write(model, model.get_parameter(NAME))
            freeze(optimizer)
            if kind == "data, in place" and (dtype is not None or settings):  # no version counter shows it
                with pytest.raises(LifecycleError, match="layers.1.*: rank 0 wrote to its memory"):
                    take_step(model, optimizer, 1)
                continue
            take_step(model, optimizer, 1)
            where = f"stage {stage}, {kind}, {settings}"
            assert (model.get_parameter(NAME) == 0.25).all(), where
            for shard in engine.named_shards():
                if shard.name == NAME:
                    assert (shard.tensor == 0.25).all(), where
                else:  # the lower bits of what was not written stay
                    assert torch.equal(shard.tensor, before[shard.name, shard.start]), f"{where}: {shard.name}"


@ranks(2)
def test_values_that_change_places_count():
    """Values that change places leave every plain sum as it was."""
    for stage in (0, 1, 2):
        for dims in ((0,), (1,), (0, 1)):
            model, engine, optimizer = trained(stage, torch.bfloat16)
            p = model.get_parameter(NAME)
            wanted = p.detach().flip(dims).clone()
            with torch.no_grad():
                p.copy_(wanted)
            freeze(optimizer)
            take_step(model, optimizer, 1)
            assert torch.equal(p, wanted), f"stage {stage}, {dims}"


@ranks(2)
def test_what_is_written_is_saved_without_a_step():
    for stage in (0, 1, 2):
        model, engine, _ = trained(stage, torch.bfloat16)
        model.get_parameter(NAME).data.fill_(0.25)
        assert all((s.tensor == 0.25).all() for s in engine.named_shards() if s.name == NAME), f"stage {stage}"
        model.get_parameter(NAME).data.fill_(0.5)
        assert (hf_zero.ShardedModel(engine).unshard().get_parameter(NAME) == 0.5).all(), f"stage {stage}"


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_a_state_dict_reaches_the_masters_unrounded(num_ranks):
    """The masters get what is loaded, not what the compute copies round it to."""
    for stage in ALL_STAGES:
        model, engine, optimizer = trained(stage, torch.bfloat16)
        with hf_zero.gathered(model, writeback=True):
            wanted = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
            model.load_state_dict(wanted)
        freeze(optimizer)
        take_step(model, optimizer, 1)
        for shard in engine.named_shards():
            run = wanted[shard.name].reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
            assert torch.equal(shard.tensor, run), f"stage {stage}: {shard.name}"


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(2)
def test_what_one_rank_alone_writes_is_refused_by_name(dtype):
    for stage in (0, 1, 2):
        for name in (NAME, "embed.bias", "layers.3.down.weight"):  # the first and the last lie on one rank each
            model, _, optimizer = trained(stage, dtype)
            if dist.get_rank() == 1:
                model.get_parameter(name).data.fill_(0.25)
            with pytest.raises(LifecycleError, match=f"^{name}: .* rank 1"):
                take_step(model, optimizer, 1)


@ranks(2)
def test_data_of_another_shape_or_dtype_is_refused_on_all_ranks():
    for stage in (0, 2):
        model, _, optimizer = trained(stage, None)
        wanted = weights_of(model)
        for data in (torch.ones(3, 3), model.get_parameter(NAME).detach().double()):
            if dist.get_rank() == 0:
                model.get_parameter(NAME).data = data
            with pytest.raises(LifecycleError, match=NAME if dist.get_rank() == 0 else "rank 0"):
                optimizer.step()
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}", exact=True)


# What comes into a model after it was sharded: the name of the first parameter that would not be trained.
PUT_INTO = {
    lambda model: setattr(model, "head", nn.Linear(6, 2)): "head.weight",
    lambda model: setattr(model, "beside", nn.Sequential(nn.ReLU(), nn.Linear(2, 2))): "beside.1.weight",
    lambda model: model.head.register_parameter("scale", nn.Parameter(torch.ones(2))): "head.scale",
    lambda model: model.layers.append(nn.Linear(6, 6)): r"layers\.\d.weight",
}


@ranks(2)
def test_a_parameter_that_is_put_in_place_of_another_is_refused():
    for stage in ALL_STAGES:
        model, _, optimizer = trained(stage, None)
        model.head.weight = nn.Parameter(torch.ones(2, 6))
        with pytest.raises(LifecycleError, match="head.weight"):
            optimizer.step()
        for put, name in PUT_INTO.items():
            model, _, optimizer = trained(stage, None)
            put(model)
            with pytest.raises(LifecycleError, match=f"^{name}: was added to the model"):
                take_step(model, optimizer, 1)
        model, _, optimizer = trained(stage, None)
        model.head.scale, model.beside = nn.Parameter(torch.ones(2), requires_grad=False), nn.ReLU()
        take_step(model, optimizer, 1)
        if stage < 3:
            with pytest.raises(LifecycleError, match="assign"):
                model.load_state_dict({"head.bias": torch.ones(2)}, strict=False, assign=True)


@pytest.mark.parametrize("later", [False, True])
def test_what_comes_frozen_is_refused_when_it_is_unfrozen(later):
    subject = Sharded(models.build("mlp"), adamw, 2)
    subject.model.beside = beside = nn.Sequential()
    subject.optimizer.step()
    beside.append(nn.Linear(2, 2).requires_grad_(not later))
    if later:
        subject.optimizer.step()
        beside.requires_grad_(True)
    with pytest.raises(LifecycleError, match="^beside.0.weight: was added to the model"):
        subject.optimizer.step()


class Renormed(Block):
    def forward(self, hidden):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(hidden)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(2)
def test_a_block_that_writes_to_its_parameters_is_refused_at_stage_3(dtype):
    model = build_seeded(lambda: Tower(block=Renormed))
    engine = hf_zero.shard(model, stage=3, compute_dtype=dtype, **SETTINGS)
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    model(inputs(0, 0).to(dtype or torch.float32)).sum().detach()
    with pytest.raises(LifecycleError, match="layers.0.up.weight.* stage 3"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(2)
def test_what_gathered_drops_is_told_or_refused(dtype):
    """Inside `gathered` without writeback: what is written is a copy at stage 3."""
    model, engine, _ = trained(3, dtype)
    state = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with hf_zero.gathered(model), pytest.raises(LifecycleError, match="writeback=True"):
        model.load_state_dict(state)
    with logged(level=logging.WARNING) as said:
        with hf_zero.gathered(model):
            pass
        with hf_zero.gathered(model), torch.no_grad():  # as PEFT does for `target_parameters`: it changes nothing
            weight = model.get_parameter(NAME)
            weight.set_(weight)
        assert not said
        with hf_zero.gathered(model):  # autograd counts no such write: each rank finds it in its own range
            model.get_parameter(NAME).data.fill_(1.0)
        assert len(said) == (NAME in {shard.name for shard in engine.named_shards()})
        assert all(NAME in line for line in said), said
        said.clear()
        with hf_zero.gathered(model):
            model.get_parameter(NAME).detach().fill_(1.0)
        with hf_zero.gathered(model):
            model.get_parameter(NAME).data = torch.ones(12, 6, dtype=dtype)
    assert len(said) == (2 if dist.get_rank() == 0 else 0) and all(NAME in line for line in said), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sample_notices_each_tensor_that_is_written(dtype):
    values = torch.randn(70000).to(dtype)
    parts = [(0, 1), (16, 32), (32, 65568), (65568, 69664)]  # a scalar, a vector, 256 x 256, 64 x 64
    sample = Sample(parts, values.device)
    before = sample.sum_of(values)
    for start, stop in parts:
        for write in (lambda p: p.mul_(1.5), lambda p: p.copy_(p.flip(0))):
            written = values.clone()
            write(written[start:stop])
            if not torch.equal(written, values):
                assert sample.sum_of(written) != before
    for start, stop in parts[2:]:  # a tenth of the rows, or of the columns
        width = int((stop - start) ** 0.5)
        for index in (slice(width // 10), (slice(None), slice(-width // 10, None))):
            written = values.clone()
            written[start:stop].view(width, width)[index] = 0
            assert sample.sum_of(written) != before
    written = values.clone()
    written[32:65568] = torch.nan
    assert sample.sum_of(written) == sample.sum_of(written.clone()) != before
