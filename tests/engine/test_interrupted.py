"""A step that breaks off anywhere, on one rank or on all: training goes on as if it had not, or without that step, on
all ranks alike; or nobody saves what came of it."""

import logging
import random
from functools import cache

import pytest
import torch

import hf_zero
from hf_zero.checkpoint.state import load_state
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import run_ranks
from tests.engine.interrupts import Break, Outcome, Phase, Policy, broken, unbroken
from tests.tiers import in_core
from tests.training import Sharded, adamw


BF16 = {"compute_dtype": torch.bfloat16}
# (ranks, settings)
WORLDS = {
    "stage 1": (2, {"stage": 1}),
    "stage 1 bf16": (2, {"stage": 1, **BF16}),
    "stage 2 bf16": (2, {"stage": 2, **BF16}),
    "stage 3": (2, {"stage": 3}),
    "stage 3 bf16": (2, {"stage": 3, **BF16}),
    "offload": (1, {"stage": 2, "offload": "optimizer", **BF16}),
    "delayed": (1, {"stage": 3, "offload": "params", "delayed_update": 1}),
}
NUM_POINTS = 4  # of each part of a step, in each world; all of them are some 1500


@cache
def _wanted(world: str, steps: tuple[int, ...]) -> torch.Tensor:
    return unbroken(*WORLDS[world], steps)


def _came_of(world: str, outcomes: list[Outcome]) -> str:
    """What came of a trial: the batches that it was trained on, or why it ended."""
    if any(outcome.weights is None for outcome in outcomes):
        return next(outcome.refusal for outcome in outcomes if outcome.weights is None)
    first = outcomes[0].weights
    if any(not torch.equal(outcome.weights, first) for outcome in outcomes):
        return "the ranks differ"
    for steps in ((0, 1, 2), (0, 2), (0, 1, 1, 2)):
        if torch.equal(first, _wanted(world, steps)):
            return str(steps)
    return "the weights are of no unbroken run"


def _policies(breaks: Phase, on: int | None) -> list[Policy]:
    if on is not None:
        return [Policy.GO_ON]
    if breaks is Phase.STEP:
        return list(Policy)
    return [Policy.RETRY, Policy.SKIP, *([Policy.AGAIN] if breaks is Phase.CLIP else [])]


@pytest.mark.parametrize("on", [None, 1])
@pytest.mark.parametrize("world", in_core(("stage 2 bf16", "stage 3"), WORLDS))
def test_a_step_that_breaks_off_is_taken_whole_or_not_at_all(world, on):
    (num_ranks, settings), choose, wrong = WORLDS[world], random.Random(f"{world} {on}"), []
    for breaks in Phase if on is None or num_ranks > 1 else ():
        _, num_calls = broken(num_ranks, settings, breaks, Policy.GO_ON, None, on=None)
        for call in choose.sample(range(1, num_calls + 1), min(NUM_POINTS, num_calls)):
            policy = choose.choice(_policies(breaks, on))
            outcomes, _ = broken(num_ranks, settings, breaks, policy, call, on=on)
            if "differ" in (found := _came_of(world, outcomes)) or "no unbroken run" in found:
                wrong.append(f"{breaks.value}, call {call} ({outcomes[on or 0].where}), {policy.name}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", ["stage 1 bf16", "stage 2 bf16", "stage 3"])
def test_a_step_that_one_rank_has_no_gradients_for_is_left_out_on_all(world, caplog):
    """The backward of one rank breaks off at its end: the others have their averages, and do not know."""
    with caplog.at_level(logging.WARNING):
        outcomes, _ = broken(*WORLDS[world], Phase.BACKWARD, Policy.GO_ON, "Schedule.end_backward", on=1)
    assert outcomes[1].where is not None
    assert _came_of(world, outcomes) == "(0, 2)"
    assert "rank 1 has dropped gradients" in caplog.text


def _drops_on_one_rank(settings: dict) -> bool:
    subject = Sharded(models.Mlp(width=128), adamw, shared_memory=False, bucket_nbytes=4096, **settings)
    before = subject.weights()
    for micro_batch in range(2):
        subject(**models.batch("mlp", seed=micro_batch)).backward()
        if subject.engine.comm.rank == 1 and micro_batch == 0:
            subject.optimizer.zero_grad()
    subject.optimizer.clip_grad_norm_(1.0)
    subject.optimizer.step()
    return all(torch.equal(weight, before[name]) for name, weight in subject.weights().items())


@pytest.mark.parametrize("settings", [{"stage": 2}, {"stage": 3, **BF16}])
def test_a_rank_that_drops_its_gradients_between_micro_batches_does_not_break_the_messages(settings):
    """It has nothing to add the second micro-batch to, and the others have."""
    assert run_ranks(_drops_on_one_rank, 2, settings) == [True, True]


@pytest.mark.parametrize("call", ["Unit.refresh", "Flat.mark_clean", "PartialStep.finish", "Schedule.end_step"])
@pytest.mark.parametrize("on", [None, 1])
def test_nobody_saves_what_a_step_has_left_torn(call, on):
    outcomes, _ = broken(*WORLDS["stage 2 bf16"], Phase.STEP, Policy.SKIP, call, on=on)
    assert outcomes[1].where is not None
    assert all("Error: " in outcome.refusal for outcome in outcomes)
    if on is None:
        assert all("saving: an optimizer step broke off" in outcome.refusal for outcome in outcomes)


def _trained(**settings) -> Sharded:
    subject = Sharded(models.build("mlp"), adamw, **settings)
    for seed in (1, 2):
        subject(**models.batch("mlp", seed=seed)).backward()
        subject.optimizer.step()
    return subject


@pytest.mark.parametrize("load", ["state", "weights"])
def test_what_a_broken_step_has_written_is_no_write_of_the_user(load, tmp_path):
    subject = _trained(stage=3, offload="params")
    engine, optimizer = subject.engine, subject.optimizer
    hf_zero.save_checkpoint(engine, optimizer, tmp_path)
    hf_zero.save_pretrained(engine, tmp_path / "weights")
    subject(**models.batch("mlp", seed=3)).backward()
    with Break("Flat.mark_clean").counting(), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    load_state(engine, optimizer, tmp_path) if load == "state" else hf_zero.load_weights(engine, tmp_path / "weights")


OFFLOADS = pytest.mark.parametrize(
    "settings", [{"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}]
)


@OFFLOADS
def test_a_backward_whose_values_a_late_update_has_changed_is_refused(settings):
    subject = _trained(**settings, delayed_update=1)
    loss = subject(**models.batch("mlp", seed=3))
    with hf_zero.gathered(subject.model):
        pass  # the update of the step before ends here
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    subject.optimizer.zero_grad()
    subject(**models.batch("mlp", seed=4)).backward()
    subject.optimizer.step()


@OFFLOADS
def test_a_backward_whose_values_an_early_update_has_changed_is_refused(settings):
    subject = _trained(**settings)
    loss = subject(**models.batch("mlp", seed=3))
    with Break("Schedule.end_backward").counting(), pytest.raises(KeyboardInterrupt), subject.optimizer.in_backward():
        loss.backward(retain_graph=True)
    subject.optimizer.zero_grad()  # what was updated stays so
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Switched(torch.optim.SGD):
    """Has other parameters to evaluate than to train, as schedule-free optimizers do."""

    elementwise = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False
            torch._foreach_mul_([param.data for param in group["params"]], 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_whose_values_an_optimizer_has_switched_is_refused(stage):
    subject = Sharded(models.build("mlp"), lambda model: Switched(model.parameters(), lr=0.1), stage)
    loss = subject(**models.batch("mlp", seed=3))
    subject.optimizer.eval()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_whose_gathering_broke_off_are_not_gathered():
    subject, num_calls = Sharded(models.build("mlp"), adamw, 3, offload="params"), 0
    batch = models.batch("mlp", seed=7)
    with torch.no_grad():
        wanted = subject(**batch)
    while True:
        at = Break(num_calls := num_calls + 7)
        entered = hf_zero.gathered(subject.model)
        try:
            with at.counting():
                entered.__enter__()
        except KeyboardInterrupt:
            assert not any(unit.num_gathered for unit in subject.engine.units), at.where
            with torch.no_grad():
                assert torch.equal(subject(**batch), wanted), at.where
        if at.where is None:
            break
    entered.__exit__(None, None, None)
    assert num_calls > 50


def test_what_a_writeback_has_left_torn_is_not_saved_before_another():
    subject = Sharded(models.build("mlp"), adamw, 3, offload="params")
    name, param = next(subject.model.named_parameters())

    def write(call: str | None) -> None:
        with Break(call).counting(), hf_zero.gathered(param, writeback=True):
            param.fill_(0.5)

    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            write("Rest.follow_written")
        with pytest.raises(LifecycleError, match=rf"gathered\(writeback=True\) broke off.*\({name}, "):
            subject.engine.check_before_save()
        write(None)
    subject.engine.check_before_save()


def test_an_update_that_raises_leaves_no_gradient_behind(monkeypatch):
    subject = Sharded(models.build("mlp"), adamw, 2)
    subject(**models.batch("mlp", seed=1)).backward()

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(torch.optim.AdamW, "step", fail)
        subject.optimizer.step()
    assert all(param.grad is None for group in subject.optimizer.param_groups for param in group["params"])
    with pytest.raises(LifecycleError, match="an optimizer step broke off"):
        subject.engine.check_before_save()
