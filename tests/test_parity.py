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
from tests import models
from tests.distributed import run_ranks
from tests.tiers import more
from tests.training import (
    Plain,
    Record,
    Sharded,
    adamw,
    assert_close,
    assert_equal,
    loss_of,
    train,
    train_accumulating,
)


ATOL = 10 * 1e-3 * 1e-9 / 1e-4  # steps * lr * rounding error of a gradient / eps

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


def _train_all_stages(name: str) -> None:
    stages = [train(Sharded(models.build(name), adamw, stage), name) for stage in range(4)]
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
    plain = train(Plain(models.build(name), adamw), name)
    assert (plain.norms > 0.1).all(), f"clipping was to be active: {plain.norms}"
    assert_close(stages[3], plain, "stage 3 and plain torch", atol=ATOL)


@pytest.mark.quick(cases=4)
@pytest.mark.support("fp32, stages bit-identical", area="Precision", stages=range(4))
@pytest.mark.parametrize("name, num_ranks", [*DIRECT, COVERING[1], *more(COVERING[0], COVERING[2])])
def test_stages_are_bit_equal_and_agree_with_ddp(name, num_ranks):
    run_ranks(_train_all_stages, num_ranks, name)


def _accumulate_all_stages(name: str) -> None:
    stages = [train_accumulating(Sharded(models.build(name), adamw, stage), name) for stage in range(4)]
    assert_equal(stages[1], stages[0], "stage 1 and stage 0")
    assert_equal(stages[3], stages[2], "stage 3 and stage 2")
    # Stages 0 and 1 add a rank's micro batches before the ranks, 2 and 3 the ranks before the micro batches.
    assert_close(stages[2], stages[0], "stage 2 and stage 0", atol=ATOL)
    plain = train_accumulating(Plain(models.build(name), adamw), name)
    assert (plain.norms > 0.1).all(), f"clipping was to be active: {plain.norms}"
    assert_close(stages[3], plain, "stage 3 and plain torch", atol=ATOL)


@pytest.mark.quick(cases=1)
@pytest.mark.direct
@pytest.mark.parametrize("name, num_ranks", [("llama", 2), ("gpt2", 3), ("llama-tied", 1)])
def test_accumulation_with_ragged_labels_agrees_with_ddp(name, num_ranks):
    run_ranks(_accumulate_all_stages, num_ranks, name)


def _way_of_exchange_changes_no_bit(name: str, dtype: torch.dtype | None) -> None:
    ways = [{}, *({"shared_memory": False, "prefetch_units": n, "bucket_nbytes": b} for n, b in DEPTHS_AND_BUCKETS)]
    for stage in range(4):
        first = None
        for way in ways if stage == 3 else ways[:2]:
            record = train(Sharded(models.build(name), adamw, stage, compute_dtype=dtype, **way), name, num_steps=3)
            first = first or record
            assert_equal(record, first, f"stage {stage}, {way}")


DEPTHS_AND_BUCKETS = [(1, 32 * 2**20), (0, 4096), (2, 5000), (9, 4096)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name, num_ranks", [("llama", 2), ("t5", 3)])
@pytest.mark.full("more cases", after=2)
def test_the_way_of_exchange_changes_no_bit(name, num_ranks, dtype):
    """Shared memory or messages, however far ahead and through whatever buckets."""
    run_ranks(_way_of_exchange_changes_no_bit, num_ranks, name, dtype)


def _train_twice(name: str) -> None:
    for stage in (1, 3):
        first, second = (train(Sharded(models.build(name), adamw, stage), name, num_steps=5) for _ in range(2))
        assert_equal(second, first, f"two runs at stage {stage}")


@pytest.mark.parametrize("name, num_ranks", [("mixtral", 3)])
def test_two_runs_are_bit_equal(name, num_ranks):
    run_ranks(_train_twice, num_ranks, name)


def _ranks_agree(name: str) -> list:
    record = train(Sharded(models.build(name, seed=dist.get_rank()), adamw, 3), name, num_steps=2)
    return [record.norms.tolist(), {key: weight.tolist() for key, weight in record.weights.items()}]


def test_ranks_start_from_rank_zero_and_stay_equal():
    first, second, third = run_ranks(_ranks_agree, 3, "gpt2")
    assert first == second == third


# Half precision


def _bf16_all_stages(name: str, reduce_dtype: torch.dtype) -> None:
    settings = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    stages = [train(Sharded(models.build(name), adamw, stage, **settings), name) for stage in range(4)]
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
    autocast = train(Plain(models.build(name), adamw, autocast=torch.bfloat16), name)
    # bf16 keeps 8 bits, so every rounding is off by up to 2^-9. The loss itself is rounded (autocast has it in fp32),
    # and so are the logits, of the order of the loss at most, after a dozen roundings that add up like random steps:
    # (1 + sqrt(12)) * 2^-9 < 1 % of the loss, and as much again for weights that are rounded here and not there. A
    # gradient passed twice as many roundings, backward after forward: norms differ by less than 5 %.
    # A weight moves by at most lr a step, decay included, hence two trainings part by at most 2 * 10 * lr.
    assert_close(stages[3], autocast, "bf16 and autocast", loss=2e-2, norm=5e-2, weight=0.0, atol=2e-2)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "name, num_ranks, reduce_dtype",
    [("llama", 2, torch.float32), ("bert", 3, torch.float32), ("gpt2", 2, torch.bfloat16), ("t5", 1, torch.float32)],
)
def test_bf16_stages_are_bit_equal_and_near_autocast(name, num_ranks, reduce_dtype):
    run_ranks(_bf16_all_stages, num_ranks, name, reduce_dtype)


def _small_steps_in_bf16(num_steps: int) -> None:
    weights = {}
    for stage in range(4):
        subject = Sharded(models.build("mlp"), _tiny_sgd, stage, compute_dtype=torch.bfloat16)
        before = {shard.name: shard.tensor.clone() for shard in subject.engine.named_shards(resident=True)}
        train(subject, "mlp", num_steps=num_steps, max_norm=None)
        moved = sum(
            (shard.tensor - before[shard.name]).abs().max() > 0 for shard in subject.engine.named_shards(resident=True)
        )
        assert moved == len(before), f"stage {stage}: {moved} of {len(before)} masters moved"
        assert all(shard.tensor.dtype is torch.float32 for shard in subject.engine.named_shards())
        weights[stage] = subject.weights()
    for stage in range(1, 4):
        assert all(torch.equal(weights[stage][name], weights[0][name]) for name in weights[0])


def _tiny_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-5)


def test_masters_keep_steps_too_small_for_bf16():
    # lr 1e-5 times gradients below 1 is less than 2^-9 of every weight above 0.005: bf16 weights would stand still.
    run_ranks(_small_steps_in_bf16, 2, 2)


def _fp16_with_overflow(stage: int, reduce_dtype: torch.dtype) -> tuple:
    subject = Sharded(models.build("mlp"), adamw, stage, compute_dtype=torch.float16, reduce_dtype=reduce_dtype)
    scaler = hf_zero.ZeroGradScaler(device="cpu", init_scale=2.0**10, growth_interval=100)
    scales, norms, shared = [], [], []
    share_buffers = subject.engine.share_buffers
    subject.engine.share_buffers = lambda: shared.append(share_buffers())
    for step in range(6):
        loss = loss_of(subject(**models.batch("mlp", seed=10 * step + dist.get_rank()))).float()
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        before = subject.weights()
        scaler.scale(loss).backward()
        scaler.unscale_(subject.optimizer)
        norms.append(subject.clip_grad_norm_(0.1).item())
        scaler.step(subject.optimizer)
        scaler.update()
        assert len(shared) == step + 1, f"stage {stage}, step {step}: buffers are shared once per step, skipped or not"
        after = subject.weights()
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved == (step != 2), f"stage {stage}, step {step}: weights {'moved' if moved else 'stayed'}"
        assert all(weight.isfinite().all() for weight in after.values()), f"stage {stage}, step {step}"
        scales.append(scaler.get_scale())
    return scales, norms, {name: weight.tolist() for name, weight in subject.weights().items()}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_overflow_on_one_rank_skips_the_step_on_all(num_ranks, reduce_dtype):
    answers = [run_ranks(_fp16_with_overflow, num_ranks, stage, reduce_dtype) for stage in range(4)]
    scales, norms, weights = answers[0][0]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    for stage, ranks in enumerate(answers):
        for rank, answer in enumerate(ranks):
            assert answer[0] == scales, f"stage {stage}, rank {rank}"
            assert answer[2] == weights, f"stage {stage}, rank {rank}"
            # the norm of the skipped step is inf or NaN
            assert answer[1][:2] + answer[1][3:] == norms[:2] + norms[3:], f"stage {stage}, rank {rank}"


def _fp16_unscaled_like_plain(stage: int, reduce_dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_scale_is_taken_off_gradients_of_all_ranks(stage, reduce_dtype):
    run_ranks(_fp16_unscaled_like_plain, 2, stage, reduce_dtype)


# Parameters that are not always used


def _train_switch(subject, routes_of, num_steps: int = 6) -> Record:
    losses, norms = [], []
    for step in range(num_steps):
        batch = models.batch("switch", seed=100 * step + dist.get_rank())
        loss = loss_of(subject(**batch, routes=routes_of(step, dist.get_rank())))
        loss.backward()
        losses.append(loss.detach())
        norms.append(subject.clip_grad_norm_(0.1).detach())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    return Record(torch.stack(losses), torch.stack(norms), subject.weights())


ROUTES = {
    "one half never": lambda step, rank: [0, 1, 0],
    "in turn": lambda step, rank: [step % 2, step // 2 % 2, 0],
    "by rank": lambda step, rank: [rank % 2] * 3,
    "by rank, at times": lambda step, rank: [int(rank == 0), int(rank == 0 and step % 2), int(step > 2)],
}


def _some_unused(key: str, settings: dict) -> None:
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.5, **settings)

    stages = [_train_switch(Sharded(models.build("switch"), make, stage), ROUTES[key]) for stage in range(4)]
    plain = _train_switch(Plain(models.build("switch"), make), ROUTES[key])
    assert torch.equal(plain.weights["spare"], torch.ones(5)), "plain torch decays what has no gradient"
    for stage in range(4):
        assert_close(stages[stage], plain, f"stage {stage} and plain torch", atol=ATOL)
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize("num_ranks, settings", [(1, {}), (2, {"fused": True}), (3, {})])
def test_unused_parameters_are_left_alone_and_count_their_own_steps(key, num_ranks, settings):
    run_ranks(_some_unused, num_ranks, key, settings)


def _step_without_gradients() -> None:
    """A step in which no parameter at all has a gradient changes nothing, and the next one works."""
    for stage in range(4):
        subject = Sharded(models.build("mlp"), adamw, stage)
        train(subject, "mlp", num_steps=1)
        before = subject.weights()
        assert subject.clip_grad_norm_(1.0) == 0.0
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        after = subject.weights()
        assert all(torch.equal(before[name], after[name]) for name in before), f"stage {stage}"
        train(subject, "mlp", num_steps=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_step_without_gradients_changes_nothing(num_ranks):
    run_ranks(_step_without_gradients, num_ranks)
