"""Training on values in few bits. Of gathers: all ranks compute with the same rounded values, and what is kept is
exact. Of reductions: what is sent is rounded, and all stages sum the same."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import hf_zero
from hf_zero.activation import shard_model
from hf_zero.checkpoint import save_checkpoint
from hf_zero.comm.blockwise import packed_nbytes
from hf_zero.errors import NonFiniteError
from tests import models
from tests.comm.test_blockwise import _rounded
from tests.compare import assert_close, assert_equal, assert_equal_on_all_ranks
from tests.distributed import ranks
from tests.test_groups import on_two_hosts
from tests.test_parity import ATOL
from tests.tiers import more
from tests.training import Record, Sharded, adamw, train, train_accumulating


NAME = "llama"
INT8 = {"gather_dtype": torch.int8}


def _subject(**settings) -> Sharded:
    return Sharded(models.build(NAME), adamw, 3, **{**INT8, **settings})


def _round_like(model, subject: Sharded) -> None:
    """Gives a plain model the values that the ranks of a sharded one compute with."""
    params, num_ranks = dict(model.named_parameters()), subject.engine.comm.shard_group.num_ranks
    for flat in subject.engine.flats:
        whole = torch.zeros(flat.layout.full_numel)
        for span, info in zip(flat.layout.spans, flat.infos):
            whole[span.offset : span.stop] = params[info.name].detach().reshape(-1)
        whole = torch.cat([_rounded(part) for part in whole.chunk(num_ranks)])
        for span, info in zip(flat.layout.spans, flat.infos):
            params[info.name].data.copy_(whole[span.offset : span.stop].view(info.shape))


def _has(model, values: dict[str, torch.Tensor], prefix: str = "") -> None:
    with hf_zero.gathered(model):
        for name, p in model.named_parameters():
            assert torch.equal(p, values[prefix + name]), name


def _with_small_neighbours() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.Linear(24, 24))
    for index, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, 1, p.numel()).view_as(p) + (300 if p is model[0].bias else index)
    model[1].bias.data.mul_(0.01)
    return model


@pytest.mark.parametrize("num_ranks", [2, *more(3)])
@ranks("num_ranks")
def test_no_parameter_is_rounded_by_the_scale_of_another(num_ranks):
    """Those beside a large one among them."""
    model, found = _with_small_neighbours(), {}
    hf_zero.shard(model, stage=3, shared_memory=False, **INT8)
    for module, name in ((model[0], "0"), (model[1], "1")):
        module.register_forward_pre_hook(
            lambda module, _, name=name: found.update({f"{name}.{k}": p.clone() for k, p in module.named_parameters()})
        )
    with torch.no_grad():
        model(torch.ones(1, 40))
    for name, p in _with_small_neighbours().named_parameters():
        assert torch.equal(found[name].flatten(), _rounded(p.detach().flatten())), name


@pytest.mark.parametrize("settings", [{"offload": "params"}, {"strict": True}])
@ranks(1)
def test_one_rank_rounds_nothing(settings):
    """Nor where parameters are brought for each use from elsewhere."""
    losses = []
    for gathers in ({}, INT8):
        model = models.build(NAME)
        hf_zero.shard(model, stage=3, **gathers, **settings)
        with torch.no_grad():
            losses.append(model(**models.batch(NAME, seed=5)).loss)
    assert torch.equal(*losses)


class _OfFloat8(torch.nn.Module):
    """Frozen weights in 8 bits that are plain parameters, as in checkpoints that were quantized by blocks."""

    def __init__(self):
        super().__init__()
        codes = torch.linspace(-3, 300, 40 * 24).view(24, 40).to(torch.float8_e4m3fn)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.inner = torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(torch.nn.functional.linear(x, self.codes.to(x.dtype))), self.codes.view(torch.uint8).clone()


@ranks(2)
def test_weights_of_8_bits_are_not_rounded():
    model = _OfFloat8()
    codes = model.codes.detach().view(torch.uint8).clone()
    hf_zero.shard(model, stage=3, shared_memory=False, **INT8)
    assert torch.equal(model(torch.ones(1, 40))[1], codes)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("shared_memory", [False, True])
@ranks(2)
def test_forwards_compute_with_rounded_values_and_all_else_with_exact_ones(shared_memory):
    subject = _subject(shared_memory=shared_memory)
    plain, batch = models.build(NAME), models.batch(NAME, seed=5)
    exact = {name: p.detach().clone() for name, p in plain.named_parameters()}
    _round_like(plain, subject)
    loss = plain(**batch).loss
    loss.backward()
    for _ in range(2):  # an evaluation first: it computes with the same values
        with torch.no_grad():
            assert torch.equal(subject(**batch).loss, loss)
    found = subject(**batch).loss
    found.backward()
    assert torch.equal(found, loss)
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    torch.testing.assert_close(subject.clip_grad_norm_(1e9).float(), norm, rtol=1e-6, atol=0)
    subject.optimizer.zero_grad()
    # what is read, written back and restored is exact
    _has(subject.model, exact)
    # also in the middle of a forward, which goes on with what was rounded, as does a backward
    block = subject.model.model.layers[1]
    looking = block.register_forward_pre_hook(lambda module, _: _has(module, exact, "model.layers.1."))
    found = subject(**batch).loss
    looking.remove()
    assert torch.equal(found, loss)
    with hf_zero.gathered(subject.model):
        found.backward()
    torch.testing.assert_close(subject.clip_grad_norm_(1e9).float(), norm, rtol=1e-6, atol=0)
    subject.optimizer.zero_grad()
    with hf_zero.gathered(subject.model, writeback=True):
        next(subject.model.parameters()).data.mul_(2)
    exact[next(iter(exact))].mul_(2)
    _has(subject.model, exact)
    subject(**batch).loss.backward()
    with hf_zero.gathered(subject.model):  # the root's slot keeps its values from here on
        assert not torch.equal(subject(**batch).loss, loss)
    hf_zero.ShardedModel(subject.model).unshard()
    for name, p in subject.model.named_parameters():
        assert torch.equal(p, exact[name]), name


def _freezes(model):
    for index, p in enumerate(model.parameters()):
        p.requires_grad_(index % 3 == 0)
    return model


def _trains_elsewhere(folder: str) -> None:
    """Rounded as in memory where parameters rest on disk, and beside an adapter."""
    messages = {"shared_memory": False}
    wanted = train(_subject(**messages), NAME, num_steps=2)
    on_disk = _subject(offload="params", offload_dir=folder, **messages)
    assert_equal(train(on_disk, NAME, num_steps=2), wanted, "parameters on disk")
    adapted = Sharded(_with_adapter(), adamw, 3, **messages, **INT8)
    plain, batch = _with_adapter(), models.batch(NAME, seed=5)
    _round_like(plain, adapted)
    loss, found = plain(**batch).loss, adapted(**batch).loss
    assert torch.equal(found, loss)
    loss.backward()
    found.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.requires_grad]).norm()
    torch.testing.assert_close(adapted.clip_grad_norm_(1e9).float(), norm, rtol=1e-6, atol=0)


def _with_adapter() -> torch.nn.Module:
    model = models.build(NAME)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return get_peft_model(model, config)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.full("more cases", after=1)
@ranks(2)
def test_a_gather_sends_a_byte_for_each_value_and_a_scale_for_256_wherever_values_rest(compute_dtype, tmp_path):
    if compute_dtype is None:
        _trains_elsewhere(tmp_path)
    subject = Sharded(_freezes(models.build(NAME)), adamw, 3, shared_memory=False, compute_dtype=compute_dtype, **INT8)
    train(subject, NAME, num_steps=1)
    engine, counters = subject.engine, subject.engine.comm.counters
    counted = dict(counters.sent_nbytes)
    with torch.no_grad():
        subject(**models.batch(NAME, seed=1))
    sent = counters.sent_nbytes["gather"] - counted["gather"]
    shards = [flat.layout.shard_numel for flat in engine.flats]
    assert sent == sum(packed_nbytes(numel) for numel in shards) * (engine.comm.num_ranks - 1)
    report = hf_zero.ShardedModel(subject.model).memory()
    assert report.buffer_nbytes >= sum(bucket.nbytes for bucket in engine.comm.packing) > 0


@pytest.mark.quick
@ranks(2)
def test_all_stages_sum_the_same_rounded_gradients(tmp_path):
    """The same bits at all stages and in each run, near to those of exact sums; what is sent is counted."""
    settings = {"shared_memory": False, "reduce_dtype": torch.int8}
    exact = train(Sharded(models.build(NAME), adamw, 2, shared_memory=False), NAME, num_steps=3)
    wanted = None
    for stage, way in [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"bucket_nbytes": 4096}),
        (2, {"offload": "optimizer"}),
    ]:
        subject = Sharded(models.build(NAME), adamw, stage, **settings, **way)
        sent = subject.engine.comm.counters.sent_nbytes
        found = train(subject, NAME, num_steps=3)
        shards = [flat.layout.shard_numel for flat in subject.engine.flats]
        assert sent["reduce"] == 3 * sum(packed_nbytes(numel) for numel in shards) * (dist.get_world_size() - 1)
        if wanted is not None:
            assert_equal(found, wanted, f"stage {stage} {way}")
        wanted = found
    _stops_at_an_infinity(subject)
    _scales_the_loss(settings)
    save_checkpoint(subject.model, subject.optimizer, tmp_path / "checkpoint")
    resumed = Sharded(models.build(NAME), adamw, 3, **settings)
    hf_zero.load_weights(resumed.model, tmp_path / "checkpoint")
    hf_zero.load_state(resumed.model, resumed.optimizer, tmp_path / "checkpoint")
    assert_equal(train(resumed, NAME, num_steps=2), train(subject, NAME, num_steps=2), "resumed")
    assert not torch.equal(exact.losses, wanted.losses)
    # a step of Adam is no longer than the learning rate, 1e-3, whatever becomes of a gradient
    assert_close(wanted, exact, "int8", loss=0.02, norm=0.05, weight=0.0, atol=6e-3)


def _stops_at_an_infinity(subject: Sharded) -> None:
    """One value of rank 1 is infinite, in the range of rank 0 and in its own."""
    block = subject.model.model.layers[1]

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[2, 3] = float("inf") if dist.get_rank() else 1.0
        return grad

    for weight in (block.self_attn.q_proj.weight, block.mlp.down_proj.weight):
        before, handle = subject.weights(), weight.register_hook(spoil)
        subject(**models.batch(NAME, seed=dist.get_rank())).loss.backward()
        handle.remove()
        with pytest.raises(NonFiniteError):
            subject.optimizer.step()
        subject.optimizer.zero_grad()
        assert all(torch.equal(values, before[name]) for name, values in subject.weights().items())


def _scales_the_loss(settings: dict) -> None:
    """A power of two is in the scale of a block, and no bit depends on it. Where rank 1 overflows, no rank steps."""
    runs: list[Record] = []
    for is_scaled in (False, True):
        subject = Sharded(models.build(NAME), adamw, 2, **settings)
        scaler = hf_zero.ZeroGradScaler("cpu", init_scale=2.0**8, enabled=is_scaled)
        losses, norms = [], []
        for seed in range(2):
            loss = subject(**models.batch(NAME, seed=10 * seed + dist.get_rank())).loss
            scaler.scale(loss).backward()
            scaler.unscale_(subject.optimizer)
            losses.append(loss.detach())
            norms.append(subject.clip_grad_norm_(0.1).detach())
            scaler.step(subject.optimizer)
            scaler.update()
            subject.optimizer.zero_grad()
        runs.append(Record(torch.stack(losses), torch.stack(norms), subject.weights()))
    assert_equal(runs[1], runs[0], "a loss that is scaled")
    loss = subject(**models.batch(NAME, seed=1)).loss
    handle = subject.model.model.layers[1].mlp.down_proj.weight.register_hook(
        lambda grad: grad * (float("inf") if dist.get_rank() else 1.0)
    )
    scaler.scale(loss).backward()
    handle.remove()
    scaler.step(subject.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert all(torch.equal(values, runs[1].weights[name]) for name, values in subject.weights().items())


@pytest.mark.parametrize("way", ["two hosts", *more("shared memory", "messages")])
@ranks(4)
def test_what_leaves_a_host_or_a_group_is_rounded(way):
    """Groups and hosts round what leaves them; every run has the same bits, on all ranks."""
    settings = {"reduce_dtype": torch.int8, "shared_memory": way != "messages"}
    exact = train(Sharded(models.build(NAME), adamw, 3), NAME, num_steps=3)
    for shard_size in (None, 2):
        runs = []
        for stage in (1, 2, 3, 3):
            with on_two_hosts(way == "two hosts"), mock.patch.object(shard_model.logger, "warning") as warning:
                subject = Sharded(models.build(NAME), adamw, stage, shard_size=shard_size, **settings)
                hf_zero.shard(subject.model, stage=stage, shard_size=shard_size, **settings)  # it is already
            assert warning.call_count == (way == "shared memory" and dist.get_rank() == 0)
            runs.append(train(subject, NAME, num_steps=3))
            assert_equal(runs[-1], runs[0], f"stage {stage}, groups of {shard_size}")
            assert_equal_on_all_ranks(subject.weights(), way)
        if way == "shared memory":  # nothing is sent
            assert_close(runs[0], exact, way, atol=ATOL)
        else:
            assert (runs[0].losses - exact.losses).abs().max() > 1e-5
            assert_close(runs[0], exact, way, loss=0.02, norm=0.05, weight=0.0, atol=6e-3)
    bf16 = {"compute_dtype": torch.bfloat16}
    exact = train_accumulating(Sharded(models.build(NAME), adamw, 3, **bf16), NAME, num_steps=2)
    runs = []
    for gathers in (INT8, INT8, {}):  # twice both, then gradients alone
        with on_two_hosts(way == "two hosts"):
            both = Sharded(models.build(NAME), adamw, 3, **bf16, **settings, **gathers)
        runs.append(train_accumulating(both, NAME, num_steps=2))
        assert_equal_on_all_ranks(both.weights(), f"gathers and reductions, {way}")
    assert_equal(runs[1], runs[0], "gathers and reductions")
    assert not torch.equal(runs[0].losses, runs[2].losses), "gathers are rounded too"
    # as where each is rounded alone: a weight by 1/254 of the largest of its block; two steps of Adam by 1e-3
    assert_close(runs[0], exact, "gathers and reductions", loss=0.02, norm=0.05, weight=0.05, atol=4e-3)
