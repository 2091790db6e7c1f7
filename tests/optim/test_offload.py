"""Masters, state and gradients in the host's memory: the same bits as without; the bytes of docs/memory.md."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.comm import Bus, Counters
from hf_zero.engine import engine_of
from hf_zero.engine.shard import NUM_PIECES, HostTransfer
from hf_zero.errors import ConfigError, LifecycleError
from hf_zero.optim import MuonWithAdamW
from hf_zero.optim.host import HostUpdate
from tests import models
from tests.distributed import RemoteError, ranks, run_ranks
from tests.tiers import more
from tests.training import Record, Sharded, adamw, assert_equal, loss_of, train, train_accumulating


PLACES = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "params")]
fused = partial(adamw, fused=True)


def feature(name: str):
    return pytest.mark.support(name, area="Offload")


def _both(name: str, stage: int, offload: str, run, make_optimizer=fused, **settings) -> tuple[Record, Record]:
    """The same training without and with offload."""
    plain = run(Sharded(models.build(name), make_optimizer, stage, **settings), name)
    away = Sharded(models.build(name), make_optimizer, stage, offload=offload, **settings)
    return plain, run(away, name)


ALIKE = "Bit-identical to training without offload: fp32, bf16, accumulation, clipping"
ALONE = "One process, one device"
CORE = [(ALIKE, *place, 2, {}) for place in PLACES] + [(ALONE, 0, "optimizer", 1, {}), (ALONE, 3, "params", 1, {})]
MORE = [
    (ALIKE, 0, "optimizer", 2, {}),
    (ALIKE, 3, "params", 2, {"shared_memory": False}),
    (ALIKE, 2, "optimizer", 2, {"reduce_dtype": torch.bfloat16}),
]


@pytest.mark.quick(cases=1)
@pytest.mark.support("{feature}", area="Offload")
@pytest.mark.direct
@pytest.mark.parametrize("feature, stage, offload, num_ranks, settings", [*CORE, *more(*MORE)])
@ranks("num_ranks")
def test_offload_changes_no_bit(feature, stage, offload, num_ranks, settings):
    for dtype in (None, torch.bfloat16):
        for run in (partial(train, num_steps=3), partial(train_accumulating, num_steps=2, num_micro=2)):
            plain, away = _both("llama", stage, offload, run, compute_dtype=dtype, **settings)
            assert_equal(plain, away, f"{dtype}, {run.func.__name__}")


@pytest.mark.support("A fraction of the model", area="Offload", stages=("optimizer", "params"))
@ranks(2)
def test_a_fraction_can_be_offloaded():
    plain = train(Sharded(models.build("llama"), fused, 3, compute_dtype=torch.bfloat16), "llama", num_steps=3)
    for offload in ("optimizer", "params"):
        settings = {"offload": offload, "offload_fraction": 0.3, "compute_dtype": torch.bfloat16}
        subject = Sharded(models.build("llama"), fused, 3, **settings)
        away = [unit.is_offloaded for unit in subject.engine.units]
        assert away[-1] and not away[0], "the last blocks, and not the embeddings"
        assert_equal(train(subject, "llama", num_steps=3), plain, offload)


def _train_early(subject: Sharded, name: str, num_steps: int = 3, early: bool = True, num_micro: int = 2) -> Record:
    losses, optimizer = [], subject.optimizer
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_steps)
    for step in range(num_steps):
        for micro in range(num_micro):
            loss = loss_of(subject(**models.batch(name, seed=100 * step + 10 * micro + dist.get_rank())))
            with optimizer.in_backward() if early and micro == num_micro - 1 else nullcontext():
                loss.backward()
            losses.append(loss.detach().float())
        if early:
            subject.engine.bus.wait_for_jobs()
            assert all(unit in optimizer._host._update.done for unit in subject.engine.units if unit.is_trainable)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Record(torch.stack(losses), torch.zeros(0), subject.weights())


@pytest.mark.parametrize("stage, offload", PLACES[1:])  # at stage 1 all is updated in the step
@ranks(2)
def test_a_forward_between_an_update_in_backward_and_its_step_is_refused(stage, offload):
    """Of some units it would see the values before the step, of others those after it."""
    subject, batch = Sharded(models.build("llama"), adamw, stage, offload=offload), models.batch("llama", seed=1)
    for end in (subject.optimizer.step, subject.optimizer.zero_grad):
        with subject.optimizer.in_backward():
            loss_of(subject(**batch)).backward()
        with (
            torch.no_grad(),
            pytest.raises(LifecycleError, match=r"forward: .* call optimizer.step\(\) or zero_grad"),
        ):
            subject(**batch)
        end()
        with torch.no_grad():
            subject(**batch)


@feature("Update in backward")
@pytest.mark.parametrize("stage, offload", PLACES[1:])
@pytest.mark.full("more cases", after=1)
@ranks(2)
def test_units_are_updated_while_backward_still_runs(stage, offload):
    for name, dtype in (("llama", None), ("llama", torch.bfloat16), ("albert", None)):
        plain = _train_early(Sharded(models.build(name), fused, stage, compute_dtype=dtype), name, early=False)
        subject = Sharded(models.build(name), fused, stage, compute_dtype=dtype, offload=offload)
        assert_equal(_train_early(subject, name), plain, f"{name}, {dtype}")
    loss_of(subject(**models.batch(name, seed=1))).backward()
    late = loss_of(subject(**models.batch(name, seed=1)))
    with subject.optimizer.in_backward():
        loss_of(subject(**models.batch(name, seed=1))).backward()
    assert subject.optimizer.clip_grad_norm_(float("inf")) > 0, "it only measures"
    with pytest.raises(LifecycleError, match="clip without in_backward"):
        subject.optimizer.clip_grad_norm_(1.0)
    with pytest.raises(LifecycleError, match="applied during an earlier backward"):
        late.backward()


class Gated(nn.Linear):
    """A layer with a factor that is used only when told to."""

    def __init__(self, width: int):
        super().__init__(width, width)
        self.gain = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x, gains: bool):
        return super().forward(x).tanh() * (self.gain if gains else 1)


class Skipping(nn.Module):
    """Leaves its second block, and a part of the others, out when told to; the ranks need not agree."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gated(16) for _ in range(3))

    def forward(self, x, skips: bool):
        for index, block in enumerate(self.blocks):
            x = x if skips and index == 1 else block(x, not skips)
        return x.square().mean()


@feature("Blocks that some or all ranks skip")
@pytest.mark.parametrize("stage, offload", [(2, "optimizer"), (3, "params")])
@ranks(2)
def test_what_no_rank_used_keeps_its_values(stage, offload):
    def run(**settings):
        model = Skipping()
        engine = hf_zero.shard(model, stage=stage, **settings)
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=0.1, weight_decay=0.5, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(5):
            loss = model(torch.randn(4, 16, generator=generator), skips=step in (1, 3) or dist.get_rank() == step)
            with optimizer.in_backward():
                loss.backward()
            optimizer.step()
        with hf_zero.gathered(model):
            return [p.detach().clone() for p in model.parameters()]

    for plain, away in zip(run(), run(offload=offload)):
        assert torch.equal(plain, away)


class Breaking(torch.autograd.Function):
    """Hands its input through; its backward fails when told to."""

    @staticmethod
    def forward(ctx, x, breaks: bool):
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.breaks:
            raise RuntimeError("broken")
        return grad, None


class Breakable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, breaks: bool = False):
        for index, block in enumerate(self.blocks):
            x = block(Breaking.apply(x, breaks) if index == 1 else x).tanh()
        return x.square().mean()


def _is_consistent(engine) -> bool:
    """Whether what is computed with is what the masters are, rounded."""
    masters = {}
    for shard in engine.named_shards(resident=True):
        masters[shard.name, shard.start] = shard.tensor.bfloat16().clone()
    with hf_zero.gathered(engine.model):
        params = dict(engine.model.named_parameters())
        return all(
            torch.equal(params[name].view(-1)[start : start + values.numel()], values)
            for (name, start), values in masters.items()
        )


@feature("A skipped or failed step after an update in backward")
@pytest.mark.parametrize("stage, offload", [(2, "optimizer"), (3, "params")])
@ranks(2)
def test_what_a_dropped_or_failed_step_leaves_is_cleared_up(stage, offload):
    model = Breakable()
    engine = engine_of(hf_zero.shard(model, stage=stage, offload=offload, compute_dtype=torch.bfloat16))
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=0.5)
    x = torch.randn(4, 64, dtype=torch.bfloat16)

    def step(early: bool) -> None:
        before = [shard.tensor.clone() for shard in engine.named_shards()]
        with optimizer.in_backward() if early else nullcontext():
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(not torch.equal(a, b.tensor) for a, b in zip(before, engine.named_shards())), "nothing was updated"
        assert _is_consistent(engine)

    for early in (False, True):
        with optimizer.in_backward():
            model(x).backward()
        optimizer.zero_grad()  # instead of a step
        assert _is_consistent(engine)
        step(early)
        with pytest.raises(RuntimeError, match="broken"), optimizer.in_backward():
            model(x, breaks=True).backward()
        step(early)
    with optimizer.in_backward():
        model(x).backward()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(LifecycleError, match="hyperparameters were changed"):
        optimizer.step()


@pytest.mark.support("Whole-parameter optimizers (Muon)", area="Offload", stages=("optimizer", "params"))
@ranks(2)
def test_an_optimizer_of_whole_matrices_steps_on_the_host():
    for stage, offload in PLACES[2:]:
        assert_equal(*_both("llama", stage, offload, partial(train, num_steps=2), MuonWithAdamW()), offload)


@feature("Writing to parameters (`gathered`), and `unshard()`")
@pytest.mark.parametrize("stage, offload", [(2, "optimizer"), (3, "params")])
@ranks(2)
def test_what_is_written_to_parameters_reaches_the_host(stage, offload):
    run = partial(train, num_steps=1)
    ends = []
    for settings in ({}, {"offload": offload}):
        subject = Sharded(models.build("llama"), fused, stage, compute_dtype=torch.bfloat16, **settings)
        run(subject, "llama")
        weight = subject.model.model.layers[1].mlp.up_proj.weight
        with hf_zero.gathered(weight, writeback=True):
            weight.data[0] = 0.5
        run(subject, "llama")
        model = hf_zero.ShardedModel(subject.engine).unshard()
        ends.append({name: p.detach() for name, p in model.named_parameters()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]) and value.dtype is ends[1][name].dtype, name


@pytest.mark.parametrize(
    "num_ranks, stage, offload", [(2, *place) for place in PLACES[1:]] + [(1, 2, "optimizer"), (1, 3, "params")]
)
@ranks("num_ranks")
def test_the_device_and_the_bus_carry_what_the_page_says(num_ranks, stage, offload):
    model = models.llama(hidden=128, layers=4)
    subject = Sharded(model, fused, stage, compute_dtype=torch.bfloat16, offload=offload)
    numel = sum(p.numel() for p in model.parameters())
    for step in range(2):
        before = dict(subject.engine.comm.counters.sent_nbytes)
        loss_of(subject(**models.batch("llama", seed=step))).backward()
        resting = hf_zero.ShardedModel(model).memory()
        subject.optimizer.step()
    moved = {way: n - before.get(way, 0) for way, n in subject.engine.comm.counters.sent_nbytes.items()}
    memory = hf_zero.ShardedModel(model).memory()
    near = partial(pytest.approx, rel=0.02)  # padding, and the norms' weights
    shard = numel / num_ranks
    whole = stage < 3 if offload == "optimizer" else False
    compute = 0 if offload == "params" else 2 * numel if whole else 2 * shard
    assert memory.parameter_nbytes == near(compute) and memory.optimizer_nbytes == 0
    assert resting.gradient_nbytes == near(2 * numel if stage == 1 else 0)
    # masters, gradients and two moments in fp32; parameters in bf16; and what the staging buffers hold at most
    expected = 16 * shard + (2 * shard if offload == "params" else 0)
    largest = max(flat.layout.shard_numel for unit in subject.engine.units for flat in unit.flats)
    staging = NUM_PIECES * (2 + 4) * largest  # as many pieces up and down, smaller than the constant they are cut at
    assert expected <= memory.host_nbytes <= expected * 1.02 + staging
    sum_nbytes = 2 if num_ranks == 1 else 4  # alone a gradient is sent as it is, else their sum
    assert moved["down"] == near(sum_nbytes * shard)
    if offload == "optimizer":
        assert moved["up"] == near(2 * shard)
    else:  # once for the forward and once for the backward, but for what is still there
        assert 2 * shard <= moved["up"] <= 4 * shard * 1.02


def test_what_is_cast_or_added_goes_through_pieces_of_constant_size():
    bus = Bus(torch.device("cpu"), Counters())
    host_transfer = HostTransfer(bus, piece_nbytes=64)
    for numel in (1, 32, 33, 1000):
        host, device = torch.ones(numel), torch.arange(numel).bfloat16()
        host_transfer.down(host, device, accumulate=True).wait()
        bus.wait_for_jobs()
        assert torch.equal(host, 1 + device.float())
        back = torch.empty(numel, dtype=torch.bfloat16)
        host_transfer.up(back, host).wait()
        assert torch.equal(back, host.bfloat16())
    assert bus.host_nbytes == 2 * NUM_PIECES * 64


def _interrupted_step(engine, optimizer, backward) -> None:
    """Ctrl-C while the step ends."""
    backward()
    with mock.patch.object(HostUpdate, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()


def _interrupted_backward(engine, optimizer, backward) -> None:
    """Ctrl-C when some units have been updated."""

    def interrupt(_) -> None:
        engine.bus.wait_for_jobs()  # what was posted has its new values
        raise KeyboardInterrupt

    block = engine.model.blocks[1]
    handle = block.register_forward_hook(lambda _module, _args, out: out.register_hook(interrupt) and None)
    with pytest.raises(KeyboardInterrupt), optimizer.in_backward():
        backward()
    handle.remove()


def _no_step(engine, optimizer, backward) -> None:
    """What rests on the device gets its values in a step, which does not come."""
    assert {unit.is_offloaded for unit in engine.units} == {False, True}
    with optimizer.in_backward():
        backward()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "spoil, settings, message",
    [
        (_interrupted_step, {"stage": 2}, "an optimizer step broke off"),
        (_interrupted_backward, {"stage": 3}, "an update in backward broke off"),
        (_no_step, {"stage": 3, "offload_fraction": 0.5}, "an update in backward broke off"),
    ],
)
def test_nothing_is_saved_after_an_update_that_was_not_whole_until_a_checkpoint_is_loaded(
    spoil, settings, message, tmp_path
):
    engine = engine_of(hf_zero.shard(models.build("mlp"), offload="optimizer", **settings))
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW)

    def backward() -> None:
        engine.model(**models.batch("mlp", seed=0)).backward()

    def step() -> None:
        with optimizer.in_backward():
            backward()
        optimizer.step()

    step()
    hf_zero.save_checkpoint(engine, optimizer, tmp_path / "whole")
    spoil(engine, optimizer, backward)
    for _ in range(2):  # also once the next forward has cleared up
        with pytest.raises(LifecycleError, match=f"{message}.* load a whole checkpoint"):
            hf_zero.save_checkpoint(engine, optimizer, tmp_path / "torn")
        with torch.no_grad():
            engine.model(**models.batch("mlp", seed=2))
    hf_zero.load_weights(engine, tmp_path / "whole")
    hf_zero.load_state(engine, optimizer, tmp_path / "whole")
    hf_zero.save_checkpoint(engine, optimizer, tmp_path / "loaded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loaded", "whole"]
    saved, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "loaded"))
    assert all(tensor.equal(again[name]) for name, tensor in saved.items())
    step()


class Failing(torch.optim.AdamW):
    """Runs out of something in its second step."""

    elementwise = True
    calls = 0

    def step(self, closure=None):
        Failing.calls += 1
        if Failing.calls > 4:
            raise RuntimeError("no space left")
        return super().step(closure)


def _fails() -> None:
    Failing.calls = 0 if dist.get_rank() == 0 else -1000
    subject = Sharded(models.build("llama"), lambda m: Failing(m.parameters(), lr=1e-3), 2, offload="optimizer")
    train(subject, "llama", num_steps=3)


def test_what_fails_on_the_thread_fails_the_step():
    with pytest.raises(RemoteError, match="no space left"):
        run_ranks(_fails, 2, timeout=60)


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"offload": "gpu"}, "not one of none, optimizer, params"),
        ({"offload": "params", "stage": 2}, "needs stage 3"),
        ({"offload_dir": "/tmp"}, "offload is 'none'"),
        ({"offload": "optimizer", "offload_fraction": 0.0}, "is not a fraction"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        hf_zero.shard(nn.Linear(2, 2), **settings)
