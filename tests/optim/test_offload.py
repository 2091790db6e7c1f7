"""Masters, state and gradients in the host's memory: the same bits as without; the bytes of docs/memory.md."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm import Bus, Counters
from hf_zero.engine.shard import NUM_PIECES, HostTransfer
from hf_zero.errors import ConfigError, LifecycleError
from hf_zero.optim import MuonWithAdamW
from tests import models
from tests.compare import assert_equal
from tests.distributed import RemoteError, ranks, run_ranks
from tests.tiers import more
from tests.training import Record, Sharded, adamw, loss_of, train, train_accumulating, train_in_backward


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
        found = []
        for settings in ({}, {"offload": offload}):
            subject = Sharded(models.build(name), fused, stage, compute_dtype=dtype, **settings)
            schedule = torch.optim.lr_scheduler.LinearLR(subject.optimizer, 1.0, 0.1, 3)
            found.append(train_in_backward(subject, name, early=bool(settings), after=schedule.step))
        assert_equal(*found, f"{name}, {dtype}")
    loss_of(subject(**models.batch(name, seed=1))).backward()
    late = loss_of(subject(**models.batch(name, seed=1)))
    with subject.optimizer.in_backward():
        loss_of(subject(**models.batch(name, seed=1))).backward()
    subject.engine.bus.wait_for_jobs()
    assert all(unit in subject.optimizer._host._update.done for unit in subject.engine.units if unit.is_trainable)
    assert subject.optimizer.clip_grad_norm_(float("inf")) > 0, "it only measures"
    with pytest.raises(LifecycleError, match="clip without in_backward"):
        subject.optimizer.clip_grad_norm_(1.0)
    with pytest.raises(LifecycleError, match="applied during an earlier backward"):
        late.backward()


@feature("Blocks that some or all ranks skip")
@pytest.mark.parametrize("stage, offload", [(2, "optimizer"), (3, "params")])
@ranks(2)
def test_what_no_rank_used_keeps_its_values(stage, offload):
    """Experts, and a parameter beside those of a unit that are used."""

    def decaying(model):
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, eps=1e-4, fused=True)

    def routes(step: int, rank: int) -> dict:
        return {"routes": [step % 2, 0, rank if step in (1, 3) else 1]}

    found = []
    for settings in ({}, {"offload": offload}):
        subject = Sharded(models.build("switch"), decaying, stage, **settings)
        found.append(train_in_backward(subject, "switch", num_steps=5, early=bool(settings), more=routes))
    assert_equal(*found, "blocks that are not used")
    assert torch.equal(found[1].weights["spare"], torch.ones(5))


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
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def breaks(_grad):
        raise RuntimeError("broken")

    subject = Sharded(models.build("mlp", seed=3), make, stage, offload=offload, compute_dtype=torch.bfloat16)
    engine, optimizer, block = subject.engine, subject.optimizer, subject.model.blocks[1]

    def backward(early: bool) -> None:
        with optimizer.in_backward() if early else nullcontext():
            subject(**models.batch("mlp", seed=1)).backward()

    def step(early: bool) -> None:
        before = [shard.tensor.clone() for shard in engine.named_shards()]
        backward(early)
        optimizer.step()
        optimizer.zero_grad()
        assert all(not torch.equal(a, b.tensor) for a, b in zip(before, engine.named_shards())), "nothing was updated"
        assert _is_consistent(engine)

    for early in (False, True):
        backward(early=True)
        optimizer.zero_grad()  # instead of a step
        assert _is_consistent(engine)
        step(early)
        handle = block.register_forward_pre_hook(lambda _module, args: args[0].register_hook(breaks) and None)
        with pytest.raises(RuntimeError, match="broken"):
            backward(early=True)
        handle.remove()
        step(early)
    backward(early=True)
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
