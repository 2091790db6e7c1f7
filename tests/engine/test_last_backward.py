"""Stages 0 and 1 reduce as backward goes: in half precision in each backward, else in the last one of a step, where it
is told which that is. No bit changes, and no rank waits for ever. (`assert_like_plain_torch` tells it, too.)"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.engine.engine import BackwardPass, ZeroEngine
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import ranks, run_ranks
from tests.engine.models import WIDTH, Tower, inputs
from tests.tiers import in_core, more
from tests.training import Sharded, adamw, loss_of, sgd


def _reentrant(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def _shared_reentrant(model: nn.Module) -> None:
    """A block that alone has a backward within the backward uses a parameter of another block."""
    model.config.use_cache, model.is_nested = False, True
    first, forward = model.model.layers[0], model.model.layers[0].forward

    def scaled(hidden: Tensor, **kwargs) -> Tensor:
        return forward(hidden, **kwargs) * model.model.layers[2].input_layernorm.weight

    first.forward = lambda hidden, **kwargs: (
        checkpoint(partial(scaled, **kwargs), hidden, use_reentrant=True)
        if model.is_nested
        else scaled(hidden, **kwargs)
    )


def _lora_reentrant(model: nn.Module) -> None:
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False), model)
    _reentrant(model)


def _frozen(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name or "layers.2.mlp" in name)


def _unused(model: nn.Module) -> None:
    """Each block but the last has a parameter that gets no gradient."""
    for block in model.model.layers[:-1]:
        block.unused = nn.Parameter(torch.ones(3))


def _skipping(model: nn.Module) -> None:
    """The block that `skipped` names is left out."""
    model.skipped = None

    def leave_out(index: int, forward: Callable) -> Callable:
        return lambda hidden, **kwargs: hidden if model.skipped == index else forward(hidden, **kwargs)

    for index, block in enumerate(model.model.layers):
        block.forward = leave_out(index, block.forward)


def _mixed(model: nn.Module) -> None:
    """Blocks have parameters of two dtypes."""
    for block in model.model.layers:
        block.mlp.to(torch.bfloat16)
        block.mlp.register_forward_pre_hook(lambda _module, args: (args[0].bfloat16(),))
        block.mlp.register_forward_hook(lambda _module, _args, output: output.float())


def _cast(values, dtype: torch.dtype):
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def _kept_in_fp32(model: nn.Module) -> None:
    """One block stays in fp32, and a part of another."""
    model._keep_in_fp32_modules = ["layers.1", "layers.2.mlp"]
    for module in (model.model.layers[1], model.model.layers[2].mlp):
        module.register_forward_pre_hook(
            lambda _module, args, kwargs: _cast((args, kwargs), torch.float32), with_kwargs=True
        )
        module.register_forward_hook(lambda _module, _args, output: _cast(output, torch.bfloat16))


def _used_elsewhere(model: nn.Module) -> None:
    """The first block's output is scaled by a parameter of the last one, which is used once more at the end."""
    weight = model.model.layers[-1].input_layernorm.weight
    model.model.layers[0].register_forward_hook(
        lambda _module, _args, output: (
            (output[0] * weight, *output[1:]) if isinstance(output, tuple) else output * weight
        )
    )


BF16 = {"stage": 1, "compute_dtype": torch.bfloat16}
# By name: the model, what changes it, and settings.
WAYS: dict[str, tuple[str, Callable | None, dict]] = {
    "stage 1": ("llama", None, {"stage": 1}),
    "stage 1, messages": ("llama", None, {"stage": 1, "shared_memory": False, "bucket_nbytes": 4096}),
    "stage 0, messages": ("llama-tied", None, {"stage": 0, "shared_memory": False}),
    "shard groups": ("llama", None, {"stage": 1, "shard_size": 1, "strict": True}),
    "stage 1, bf16": ("llama", None, BF16),
    "stage 0, bf16, messages": ("llama-tied", None, {**BF16, "stage": 0, "shared_memory": False}),
    "bf16, shard groups": ("llama", None, {**BF16, "shard_size": 1, "strict": True}),
    "bf16, messages, buckets": ("llama", None, {**BF16, "shared_memory": False, "bucket_nbytes": 4096}),
    "bf16, two dtypes": ("llama", _mixed, {"stage": 1}),
    "bf16, a block in fp32": ("llama", _kept_in_fp32, BF16),
    "bf16, reentrant checkpointing": ("llama", _reentrant, BF16),
    "bf16, used in a backward within": ("llama", _shared_reentrant, BF16),
    "bf16, parameters unused": ("llama", _unused, BF16),
    "bf16, used in another block": ("llama", _used_elsewhere, BF16),
    "bf16, blocks skipped": ("llama", _skipping, BF16),
    "bf16, most of it frozen": ("llama", _frozen, BF16),
    "bf16, two stacks": ("t5", None, BF16),
    "bf16, optimizer on the host": ("llama", None, {**BF16, "offload": "optimizer"}),
    "stage 2": ("llama", None, {"stage": 2}),
    "stage 3, messages": ("llama", None, {"stage": 3, "shared_memory": False}),
    "values in 8 bits": ("llama", None, {"stage": 1, "reduce_dtype": torch.int8, "shared_memory": False}),
    "used in a backward within": ("llama", _shared_reentrant, {"stage": 1}),
    "LoRA, reentrant checkpointing": ("llama", _lora_reentrant, {"stage": 1}),
    "blocks skipped": ("llama", _skipping, {"stage": 1}),
    "optimizer on the host": ("llama", None, {"stage": 1, "offload": "optimizer"}),
}
# Ways in which nothing is reduced before the end, and those in which that depends on the rank.
AT_THE_END = {
    "bf16, reentrant checkpointing",
    "bf16, used in a backward within",
    "bf16, optimizer on the host",
    "stage 2",
}
AT_THE_END |= {
    "stage 3, messages",
    "used in a backward within",
    "LoRA, reentrant checkpointing",
    "optimizer on the host",
}
ON_SOME_RANKS = {"bf16, blocks skipped", "blocks skipped"}
NUM_STEPS = 4


class Training:
    """A model whose last backward of a step is told or not."""

    def __init__(self, way: str, tells: bool = True):
        self.name, change, settings = WAYS[way]
        model = models.build(self.name)
        if change is not None:
            change(model)
        self.tells = tells
        self.subject = Sharded(model, adamw, **settings)
        self.engine = self.subject.engine
        self.num_early = 0  # units whose reduction had begun at the end of the last backward

    def loss(self, step: int, micro: int) -> Tensor:
        rank = dist.get_rank()
        batch = models.batch(self.name, seed=100 * step + 10 * micro + rank)
        self.subject.model.skipped = (step + micro + rank) % 3  # on each rank another block
        return loss_of(self.subject(**batch))

    def backward(self, step: int, micro: int, is_last: bool) -> None:
        loss, is_told = self.loss(step, micro), is_last and self.tells
        sharded, finish = hf_zero.ShardedModel(self.subject.model), BackwardPass.finish

        def count(backward: BackwardPass) -> None:
            self.num_early = len(backward.num_coming) - len(backward._early)
            finish(backward)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardPass, "finish", count)
            with sharded.reducing_this_backward(loss) if is_told else nullcontext():
                loss.backward()

    def update(self) -> Tensor:
        norm = self.subject.clip_grad_norm_(0.1)
        self.subject.optimizer.step()
        self.subject.optimizer.zero_grad()
        return norm.detach()

    def step(self, step: int, num_micro: int = 2) -> Tensor:
        for micro in range(num_micro):
            self.backward(step, micro, micro == num_micro - 1)
        return self.update()

    def weights(self) -> Tensor:
        return torch.cat([weight.flatten() for weight in self.subject.weights().values()])


def _trained(way: str, tells: bool) -> tuple[Tensor, Tensor]:
    """Trains with all that a loop may do between backward and step, and steps of one, two and three micro-batches."""
    training, found = Training(way, tells), []
    handle, name = (
        hf_zero.ShardedModel(training.subject.model),
        next(name for name, param in training.subject.model.named_parameters() if param.requires_grad),
    )
    for step in range(NUM_STEPS):
        for micro in range(num_micro := 1 + step % 3):
            training.backward(step, micro, micro == num_micro - 1)
            training.subject.model.eval()
            with torch.no_grad():
                found.append(training.loss(step, micro))
            training.subject.model.train()
        if step % 2:
            grad = handle.full_grad(name)
            found.append(torch.zeros(()) if grad is None else grad.norm())
            with hf_zero.gathered(training.subject.model):
                pass
        found.append(training.update())
        if tells and way not in ON_SOME_RANKS:
            expects = way not in AT_THE_END and step > 0
            assert (training.num_early > 0) is expects, f"{way}, step {step}: {training.num_early} units"
    return torch.stack(found), training.weights()


@contextmanager
def _at_its_end(is_so: bool = True):
    """Backward reduces at its end, or the step does; nothing as it goes."""
    with pytest.MonkeyPatch.context() as patch:
        if is_so:
            patch.setattr(ZeroEngine, "reduced_early", lambda *_: [])
        yield


def _no_bit_changes(ways: list[str]) -> None:
    for way in ways:
        with _at_its_end():
            expected = _trained(way, tells=False)
        found = _trained(way, tells=True)
        for kind, (old, new) in zip(("losses and norms", "weights"), zip(expected, found)):
            assert torch.equal(old, new), f"{way}: other {kind}, by {(old - new).abs().max()}"


CORE = (
    (
        *("stage 0, messages", "stage 1", "used in a backward within", "blocks skipped"),
        *("stage 0, bf16, messages", "bf16, two dtypes", "bf16, used in a backward within", "bf16, blocks skipped"),
        "bf16, a block in fp32",
    ),
    2,
)
CASES = [CORE, (tuple(way for way in WAYS if way not in CORE[0]), 2)]
CASES += [(("stage 1", "shard groups", "blocks skipped", "stage 1, bf16", "bf16, blocks skipped"), 3)]


@pytest.mark.parametrize("ways, num_ranks", in_core([CORE], CASES), ids=["core", "more", "3 ranks"])
def test_no_bit_changes_where_backward_reduces_as_it_goes(ways, num_ranks):
    run_ranks(_no_bit_changes, num_ranks, list(ways), timeout=240.0)


def _accumulates(way: str, holds: bool, told_last: bool | None, fails: int | None = None) -> tuple[Tensor, int]:
    """Trains in steps of three micro-batches, and returns the weights and the bytes that the last step has reduced."""
    training = Training(way)
    counters = training.engine.comm.counters.sent_nbytes
    for step in range(3):
        before = counters.get("reduce", 0)
        for micro in range(3):
            loss = training.loss(step, micro)
            reduces = told_last if micro == 2 else False
            sharded = hf_zero.ShardedModel(training.subject.model)
            is_told = holds and reduces is not None
            with sharded.reducing_this_backward(loss, reduces) if is_told else nullcontext():
                if (step, micro, dist.get_rank()) == (1, fails, 1):
                    loss.register_hook(lambda _grad: 1 / 0)
                with suppress(ZeroDivisionError):
                    loss.backward()
        if holds and told_last is not True and fails is None:
            assert any(gradient.local_sum is not None for gradient in training.engine.gradients) is (
                told_last is False
            )
        is_broken = fails is not None and step == 1
        with pytest.raises(LifecycleError, match="rank 1 has dropped") if is_broken else nullcontext():
            training.update()
        assert all(gradient.local_sum is None for gradient in training.engine.gradients)
    return training.weights(), counters.get("reduce", 0) - before


@pytest.mark.parametrize("told_last", [True, None, False])
@pytest.mark.parametrize("way", ["stage 0, bf16, messages", "bf16, messages, buckets", "bf16, a block in fp32"])
@ranks(2)
def test_held_gradients_are_sent_once_per_step(way, told_last):
    weights, nbytes = _accumulates(way, False, told_last)
    held_weights, held_nbytes = _accumulates(way, True, told_last)
    torch.testing.assert_close(held_weights, weights, rtol=1e-2, atol=1e-3)  # weights in bf16
    most = nbytes if "fp32" in way else nbytes * 2 / 3  # once in fp32 instead of three times in bf16
    assert 0 < held_nbytes <= most and held_nbytes < nbytes


@pytest.mark.parametrize("fails", [0, 1, 2])
@ranks(2)
def test_a_backward_that_raises_on_one_rank_when_others_are_held_is_an_error_on_all(fails):
    _accumulates("stage 0, bf16, messages", True, True, fails=fails)


@ranks(2)
def test_steps_in_fp32_and_with_sharded_gradients_do_not_change_when_backwards_are_told_to_wait():
    for way in ("stage 1", "stage 2", "stage 3, messages", "bf16, optimizer on the host"):
        assert torch.equal(_accumulates(way, False, None)[0], _accumulates(way, True, None)[0]), way


@pytest.mark.parametrize("way", ["bf16, used in a backward within", *more(("used in a backward within",))])
@ranks(2)
def test_a_backward_within_that_comes_too_late_is_refused_once(way):
    trained = []
    for is_early in (False, True):
        with _at_its_end(not is_early):
            training = Training(way)
            training.subject.model.is_nested = False
            training.step(0, num_micro=1)
            training.step(1, num_micro=1)
            training.subject.model.is_nested = True
            if is_early:
                with pytest.raises(LifecycleError, match="'model.layers.2': a gradient came in a backward within"):
                    training.backward(2, 0, is_last=True)
                training.subject.optimizer.zero_grad()
            for step in (2, 3):
                training.step(step, num_micro=1)
                assert not training.subject.optimizer.step_was_skipped
            trained.append(training.weights())
    assert torch.equal(*trained)


@ranks(2)
def test_of_two_models_in_one_loss_ranks_may_leave_out_other_blocks():
    """One model takes what another returns, and each rank leaves out other blocks of the latter."""
    trained = []
    for is_early in (False, True):
        with _at_its_end(not is_early):
            torch.manual_seed(0)
            first, second = Tower(), Tower()
            second.embed = nn.Linear(2, WIDTH)
            settings = {**BF16, "stage": 1, "shared_memory": False, "timeout_seconds": 10.0}
            optimizers = [
                hf_zero.ShardedOptimizer(hf_zero.shard(model, **settings), sgd(model)) for model in (first, second)
            ]
            for step in range(3):
                second.order = [0, 1, 2, 3] if (dist.get_rank() + step) % 2 else [0, 3]
                batch = inputs(dist.get_rank(), step).bfloat16()
                second(first(batch)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with hf_zero.gathered(first), hf_zero.gathered(second):
                trained += [p.detach().clone() for model in (first, second) for p in model.parameters()]
    half = len(trained) // 2
    assert all(torch.equal(old, new) for old, new in zip(trained[:half], trained[half:], strict=True))


DROPPING = ["stage 1, messages", *more("stage 0, messages", "stage 2", "stage 3, messages", "optimizer on the host")]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("way", DROPPING)
@ranks(2)
def test_what_all_ranks_drop_behind_the_last_backward_is_in_no_step(way, clips):
    """As a loop does that skips batches whose norm, or loss, is too large."""
    training, expected = Training(way), Training(way, tells=False)
    for each in (training, expected):
        each.step(0)
    training.backward(1, 0, is_last=True)
    if clips:
        training.subject.clip_grad_norm_(0.1)
    training.subject.optimizer.zero_grad()
    for step in (2, 3):
        for each in (training, expected):
            each.step(step)
        assert not training.subject.optimizer.step_was_skipped
    assert torch.equal(training.weights(), expected.weights())


@ranks(2)
def test_a_backward_behind_the_last_is_refused():
    training = Training("stage 1")
    training.step(0)
    training.backward(1, 0, is_last=True)
    with pytest.raises(LifecycleError, match=r"a backward came after the gradients were clipped, or averaged .*"):
        training.backward(1, 1, is_last=True)


@ranks(2)
def test_a_rank_that_is_not_told_reduces_in_the_same_order():
    """One rank alone tells, clips or not: all reduce in one order, whenever they do."""
    for clips in (True, False):
        results = []
        for telling in (None, 1):
            training = Training("stage 1, messages", tells=dist.get_rank() == telling)
            for step in range(3):
                for micro in range(2):
                    training.backward(step, micro, micro == 1)
                if clips:
                    training.subject.clip_grad_norm_(0.1)
                training.subject.optimizer.step()
                training.subject.optimizer.zero_grad()
            results.append(training.weights())
        assert torch.equal(*results)
