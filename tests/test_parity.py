"""Sharding is bookkeeping: every stage computes what plain data parallelism computes.

Stages are compared with each other bit for bit, and with torch's DDP (with one process: plain torch) to rounding.

[Note: why eps is 1e-4] AdamW moves an element by lr * m / (sqrt(v) + eps). Where the true gradient is zero (the bias
of the attention keys, which softmax cancels) or tiny, m and v are rounding errors, and with torch's eps of 1e-8 the
quotient of two rounding errors moves the weight by as much as lr a step, in any direction. Clipped to a norm of 0.1,
some 10^4 elements are about 10^-3 each, and a sum of such terms is off by ten roundings, 10 * 2^-23 * 10^-3 ~ 1e-9. So
a step is off by lr * 1e-9 / eps. ATOL is that for 10 steps; it matters where all elements of a tensor are near zero.
"""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.distributed import NativeComm
from hf_zero.engine import build
from tests import models
from tests.compare import assert_close, assert_equal, assert_equal_on_all_ranks
from tests.distributed import ranks
from tests.tiers import more
from tests.training import Plain, Record, Sharded, adamw, loss_of, train, train_accumulating


ATOL = 10 * 1e-3 * 1e-9 / 1e-4  # steps * lr * rounding error of a gradient / eps
NUM_STEPS = 6  # of most trainings; none here has more than 10

# Every architecture, every number of ranks.
COVERING = [
    ("llama", 2),
    ("llama-tied", 3),
    ("gpt2", 2),
    ("bert", 3),
    ("t5", 2),
    ("mixtral", 2),
    ("vit", 4),
    ("albert", 3),
    ("t5", 1),
    ("gpt2", 1),
]
# Gradients of weights are written where they are reduced, as those of large weights are.
DIRECT = [pytest.param(name, num_ranks, marks=pytest.mark.direct) for name, num_ranks in COVERING]


@pytest.mark.quick(cases=4)
@pytest.mark.support("fp32, stages bit-identical", area="Precision", stages=range(4))
@pytest.mark.parametrize("name, num_ranks", [*DIRECT, COVERING[1], *more(COVERING[0], COVERING[2])])
@ranks("num_ranks")
def test_stages_are_bit_equal_and_agree_with_ddp(name, num_ranks):
    stages = [train(Sharded(models.build(name), adamw, stage), name, num_steps=NUM_STEPS) for stage in range(4)]
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
    plain = train(Plain(models.build(name), adamw), name, num_steps=NUM_STEPS)
    assert (plain.norms > 0.1).all(), f"clipping was to be active: {plain.norms}"
    assert_close(stages[3], plain, "stage 3 and plain torch", atol=ATOL)


@pytest.mark.quick(cases=1)
@pytest.mark.direct
@pytest.mark.parametrize("name, num_ranks", [("llama", 2), ("gpt2", 3), ("llama-tied", 1)])
@ranks("num_ranks")
def test_accumulation_with_ragged_labels_agrees_with_ddp(name, num_ranks):
    stages = [train_accumulating(Sharded(models.build(name), adamw, stage), name) for stage in range(4)]
    assert_equal(stages[1], stages[0], "stage 1 and stage 0")
    assert_equal(stages[3], stages[2], "stage 3 and stage 2")
    # Stages 0 and 1 add a rank's micro batches before the ranks, 2 and 3 the ranks before the micro batches.
    assert_close(stages[2], stages[0], "stage 2 and stage 0", atol=ATOL)
    plain = train_accumulating(Plain(models.build(name), adamw), name)
    assert (plain.norms > 0.1).all(), f"clipping was to be active: {plain.norms}"
    assert_close(stages[3], plain, "stage 3 and plain torch", atol=ATOL)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@ranks(2)
def test_messages_and_the_backends_collectives_compute_what_shared_memory_does(dtype):
    """Of two ranks a sum has one order."""
    for stage in range(4):
        wanted = train(Sharded(models.build("llama"), adamw, stage, compute_dtype=dtype), "llama", num_steps=3)
        settings = {"compute_dtype": dtype, "shared_memory": False}
        found = train(Sharded(models.build("llama"), adamw, stage, **settings), "llama", num_steps=3)
        assert_equal(found, wanted, f"stage {stage}, messages")
        with pytest.MonkeyPatch.context() as patch:
            native = NativeComm(dist.group.WORLD, torch.device("cpu"), 60.0, 4096)
            patch.setattr(build, "connect", lambda *_, native=native, **__: native)
            subject = Sharded(models.build("llama"), adamw, stage, **settings)
        assert_equal(train(subject, "llama", num_steps=3), wanted, f"stage {stage}, the backend's collectives")


@ranks(3)
def test_ranks_start_from_rank_zero_and_stay_equal():
    subject = Sharded(models.build("gpt2", seed=dist.get_rank()), adamw, 3)
    train(subject, "gpt2", num_steps=2)
    assert_equal_on_all_ranks(subject.weights(), "trained")


# Half precision


@pytest.mark.quick(cases=1)
@pytest.mark.support("bf16 copies of fp32 masters", area="Precision", stages=range(4))
@pytest.mark.parametrize(
    "name, num_ranks, reduce_dtype",
    [("llama", 2, torch.float32), ("bert", 3, torch.float32), ("gpt2", 2, torch.bfloat16), ("t5", 1, torch.float32)],
)
@ranks("num_ranks")
def test_bf16_stages_are_bit_equal_and_near_autocast(name, num_ranks, reduce_dtype):
    settings = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    stages = [
        train(Sharded(models.build(name), adamw, stage, **settings), name, num_steps=NUM_STEPS) for stage in range(4)
    ]
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
    autocast = train(Plain(models.build(name), adamw, autocast=torch.bfloat16), name, num_steps=NUM_STEPS)
    # bf16 keeps 8 bits, so every rounding is off by up to 2^-9. The loss itself is rounded (autocast has it in fp32),
    # and so are the logits, of the order of the loss at most, after a dozen roundings that add up like random steps:
    # (1 + sqrt(12)) * 2^-9 < 1 % of the loss, and as much again for weights that are rounded here and not there. A
    # gradient passed twice as many roundings, backward after forward: norms differ by less than 5 %.
    # A weight moves by at most lr a step, decay included, hence two trainings part by at most 2 * 6 * lr.
    assert_close(stages[3], autocast, "bf16 and autocast", loss=2e-2, norm=5e-2, weight=0.0, atol=2 * NUM_STEPS * 1e-3)


def _tiny_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-5)


@ranks(2)
def test_masters_keep_steps_too_small_for_bf16():
    # lr 1e-5 times gradients below 1 is less than 2^-9 of every weight above 0.005: bf16 weights would stand still.
    weights = {}
    for stage in range(4):
        subject = Sharded(models.build("mlp"), _tiny_sgd, stage, compute_dtype=torch.bfloat16)
        before = {shard.name: shard.tensor.clone() for shard in subject.engine.named_shards(resident=True)}
        train(subject, "mlp", num_steps=2, max_norm=None)
        moved = sum(
            (shard.tensor - before[shard.name]).abs().max() > 0 for shard in subject.engine.named_shards(resident=True)
        )
        assert moved == len(before), f"stage {stage}: {moved} of {len(before)} masters moved"
        assert all(shard.tensor.dtype is torch.float32 for shard in subject.engine.named_shards())
        weights[stage] = subject.weights()
    for stage in range(1, 4):
        assert all(torch.equal(weights[stage][name], weights[0][name]) for name in weights[0])


OFFLOADED = pytest.mark.support("fp16 with a loss scale", area="Offload", stages=("optimizer", "params"))


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "num_ranks, settings",
    [(1, {}), (3, {}), *more((4, {"shard_size": 2})), pytest.param(2, {"offload": "optimizer"}, marks=OFFLOADED)],
)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@ranks("num_ranks")
def test_overflow_on_one_rank_skips_the_step_on_all(num_ranks, settings, reduce_dtype):
    """Of one element, which lies in the shard of one rank."""

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = float("inf") if dist.get_rank() == num_ranks - 1 else 1.0
        return grad

    settings = {"compute_dtype": torch.float16, "reduce_dtype": reduce_dtype, **settings}
    records = []
    for stage in range("shard_size" in settings, 4):
        if stage == 3 and "offload" in settings:
            settings["offload"] = "params"
        subject = Sharded(models.build("mlp"), adamw, stage, **settings)
        scaler = hf_zero.ZeroGradScaler(device="cpu", init_scale=2.0**10, growth_interval=100)
        scales, norms, shared = [], [], []
        share_buffers = subject.engine.share_buffers
        subject.engine.share_buffers = lambda shared=shared, act=share_buffers: shared.append(act())
        for step in range(6):
            loss = loss_of(subject(**models.batch("mlp", seed=10 * step + dist.get_rank()))).float()
            before, what = subject.weights(), f"stage {stage}, step {step}"
            handle = subject.model.embed.weight.register_hook(overflow) if step == 2 else None
            scaler.scale(loss).backward()
            if handle is not None:
                handle.remove()
            scaler.unscale_(subject.optimizer)
            norms.append(subject.clip_grad_norm_(0.1))
            scaler.step(subject.optimizer)
            scaler.update()
            assert len(shared) == step + 1, f"{what}: buffers are shared once per step, skipped or not"
            after = subject.weights()
            assert any(not torch.equal(before[name], after[name]) for name in before) == (step != 2), what
            assert all(weight.isfinite().all() for weight in after.values()), what
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0] and not norms.pop(2).isfinite()
        assert_equal_on_all_ranks(subject.weights(), f"stage {stage}")
        records.append(Record(torch.tensor(scales), torch.stack(norms), subject.weights()))
    for record in records[1:]:
        assert_equal(record, records[0], "stages")


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_loss_scale_is_taken_off_gradients_of_all_ranks(stage, reduce_dtype):
    """A scale that is a power of two changes no bit of a gradient that does not underflow."""
    plain = Sharded(models.build("switch"), adamw, stage, compute_dtype=torch.float16, reduce_dtype=reduce_dtype)
    scaled = Sharded(models.build("switch"), adamw, stage, compute_dtype=torch.float16, reduce_dtype=reduce_dtype)
    scaler = hf_zero.ZeroGradScaler(device="cpu", init_scale=4.0)
    for step in range(3):
        batch = models.batch("switch", seed=step)
        batch["routes"] = [dist.get_rank() % 2] * 3  # each rank uses experts of its own
        loss_of(plain(**batch)).float().backward()
        wanted = plain.clip_grad_norm_(0.1)
        plain.optimizer.step()
        scaler.scale(loss_of(scaled(**batch)).float()).backward()
        scaler.unscale_(scaled.optimizer)
        norm = scaled.clip_grad_norm_(0.1)
        scaler.step(scaled.optimizer)
        scaler.update()
        # subnormal fp16 gradients (below 2^-14) keep up to two bits more when scaled by 4: 2^-24 each
        assert abs(norm - wanted) <= 1e-3 * wanted, f"stage {stage}, step {step}: norm {norm}, without scale {wanted}"
    weights = plain.weights()
    for name, weight in scaled.weights().items():
        error = (weight - weights[name]).abs().max().item()
        assert error <= 3 * 1e-3 * 1e-2, f"stage {stage}: {name} differs by {error:.2e}"  # 1 % of 3 steps of lr


# Parameters that are not always used


# Of each layer's two experts, the one that is used.
ROUTES = {
    "one half never": lambda step, rank: [0, 1, 0],
    "in turn": lambda step, rank: [step % 2, step // 2 % 2, 0],
    "by rank": lambda step, rank: [rank % 2] * 3,
    "by rank, at times": lambda step, rank: [int(rank == 0), int(rank == 0 and step % 2), int(step > 2)],
}


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize("num_ranks, settings", [(1, {}), (2, {"fused": True}), *more((3, {}))])
@ranks("num_ranks")
def test_unused_parameters_are_left_alone_and_count_their_own_steps(key, num_ranks, settings):
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.5, **settings)

    def run(subject):
        return train(subject, "switch", num_steps=6, more=lambda step, rank: {"routes": ROUTES[key](step, rank)})

    stages = [run(Sharded(models.build("switch"), make, stage)) for stage in range(4)]
    plain = run(Plain(models.build("switch"), make))
    assert torch.equal(plain.weights["spare"], torch.ones(5)), "plain torch decays what has no gradient"
    for stage in range(4):
        assert_close(stages[stage], plain, f"stage {stage} and plain torch", atol=ATOL)
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
