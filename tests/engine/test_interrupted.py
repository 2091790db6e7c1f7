"""A step that breaks off anywhere, on one rank or on all: training goes on as if it had not, or without that step, on
all ranks alike; or nobody saves what came of it."""

import logging
import random
import tempfile
from functools import cache

import pytest
import torch

import hf_zero
from hf_zero.activation import offload
from hf_zero.checkpoint.state import load_state
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import run_ranks
from tests.engine.interrupts import (
    MUCH_PATIENCE_SECONDS,
    Break,
    Outcome,
    Phase,
    Policy,
    World,
    broken,
    unbroken,
)
from tests.tiers import in_core
from tests.training import Sharded, adamw


@pytest.fixture(autouse=True)
def _moves_all(monkeypatch):
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)


BF16 = {"compute_dtype": torch.bfloat16}
WORLDS = {
    "stage 1": World(2, {"stage": 1}),
    "stage 1 bf16": World(2, {"stage": 1, **BF16}),
    "told 1": World(2, {"stage": 1}, tells=True),
    "told 0": World(2, {"stage": 0}, num_micro_batches=2, tells=True),
    "stage 2 bf16": World(2, {"stage": 2, **BF16}),
    "stage 3": World(2, {"stage": 3}),
    "stage 3 bf16": World(2, {"stage": 3, **BF16}),
    "offload": World(1, {"stage": 2, "offload": "optimizer", **BF16}),
    "accumulation 1": World(2, {"stage": 1}, num_micro_batches=2),
    "accumulation 2 bf16": World(2, {"stage": 2, **BF16}, num_micro_batches=2),
    "accumulation 3": World(2, {"stage": 3}, num_micro_batches=2),
    "offload 2": World(2, {"stage": 2, "offload": "optimizer", **BF16}),
    "params 2": World(2, {"stage": 3, "offload": "params", **BF16}),
    "in backward": World(1, {"stage": 3, "offload": "params"}, in_backward=True),
    "in backward 2": World(2, {"stage": 2, "offload": "optimizer"}, in_backward=True),
    "in backward 3": World(2, {"stage": 3, "offload": "params", **BF16}, in_backward=True),
    "disk": World(1, {"stage": 3, "offload": "params", "offload_dir": tempfile.gettempdir()}),
    "disk 2": World(2, {"stage": 2, "offload": "optimizer", "offload_dir": tempfile.gettempdir()}),
    "groups": World(4, {"stage": 3}, shard_size=2),
    "int8": World(2, {"stage": 3, "gather_dtype": torch.int8, "reduce_dtype": torch.int8}, num_blocks=3),
    "activations": World(2, {"stage": 3, "offload_activations": True}, num_blocks=3),
    "scaled": World(2, {"stage": 2, "compute_dtype": torch.float16}, is_scaled=True),
}
FROM_STAGE_2 = [{"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}]  # on one rank, too
OFFLOADS = pytest.mark.parametrize("settings", FROM_STAGE_2)
NUM_POINTS = 4  # of each part of a step, in each world; all of them are some 1500


RANKS_DIFFER, NO_RUN = "the ranks differ", "the weights are of no unbroken run"  # what must not come of a trial


@cache
def _wanted(world: str, steps: tuple[int, ...]) -> torch.Tensor:
    return unbroken(WORLDS[world], steps)


@cache
def _wanted_without(world: str) -> torch.Tensor:
    """Of a run in which rank 1 has no batch in the step that breaks off, as all ranks are told."""
    return unbroken(WORLDS[world], (0, 1, 2), absent=(1, 1))


def _came_of(world: str, outcomes: list[Outcome]) -> str:
    """What came of a trial: the batches that it was trained on, or why it ended."""
    if any(outcome.weights is None for outcome in outcomes):
        return next(outcome.refusal for outcome in outcomes if outcome.weights is None)
    first = outcomes[0].weights
    if any(not torch.equal(outcome.weights, first) for outcome in outcomes):
        return RANKS_DIFFER
    for steps in ((0, 1, 2), (0, 2), (0, 1, 1, 2)):
        if torch.equal(first, _wanted(world, steps)):
            return str(steps)
    if world in ("stage 1", "told 1") and torch.equal(first, _wanted_without(world)):
        return "(0, 1, 2), of which rank 1 had none of 1"
    if WORLDS[world].in_backward:
        return "a part may stay updated, until whole steps were taken"
    return NO_RUN


def _policies(breaks: Phase, on: int | None) -> list[Policy]:
    if on is not None:
        return [Policy.GO_ON]
    if breaks is Phase.STEP:
        return list(Policy)
    return [Policy.RETRY, Policy.SKIP, *([Policy.AGAIN] if breaks is Phase.CLIP else [])]


@pytest.mark.full("more cases", after=3)
@pytest.mark.parametrize("on", [None, 1])
@pytest.mark.parametrize("world", in_core(("stage 1", "told 1", "stage 2 bf16", "stage 3"), WORLDS))
def test_a_step_that_breaks_off_is_taken_whole_or_not_at_all(world, on):
    settings, choose, wrong = WORLDS[world], random.Random(f"{world} {on}"), []
    for breaks in Phase if on is None or settings.num_ranks > 1 else ():
        _, num_calls = broken(settings, breaks, Policy.GO_ON, None, on=None)
        for call in choose.sample(range(1, num_calls + 1), min(NUM_POINTS, num_calls)):
            policy = choose.choice(_policies(breaks, on))
            outcomes, _ = broken(settings, breaks, policy, call, on=on)
            if (found := _came_of(world, outcomes)) in (RANKS_DIFFER, NO_RUN):
                wrong.append(f"{breaks.value}, call {call} ({outcomes[on or 0].where}), {policy.name}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", ["stage 1", "stage 1 bf16", "told 1", "stage 2 bf16", "stage 3"])
def test_a_step_that_one_rank_has_no_gradients_for_is_left_out_on_all(world, caplog):
    """The backward of one rank breaks off at its end: the others have their averages, and do not know."""
    with caplog.at_level(logging.WARNING):
        at = Phase.BACKWARD, Policy.GO_ON, "Schedule.end_backward"
        outcomes, _ = broken(WORLDS[world], *at, on=1, patience_seconds=MUCH_PATIENCE_SECONDS)
    assert outcomes[1].where is not None
    assert _came_of(world, outcomes) == "(0, 2)"
    assert "rank 1 has dropped gradients" in caplog.text


@pytest.mark.parametrize("policy, batches", [(Policy.SKIP, "(0, 2)"), (Policy.RETRY, "(0, 1, 2)")])
def test_what_all_ranks_drop_behind_the_last_backward_costs_no_other_step(policy, batches, caplog):
    at = Phase.BACKWARD, policy, "Schedule.end_backward"
    with caplog.at_level(logging.WARNING):
        outcomes, _ = broken(WORLDS["told 1"], *at, on=None, patience_seconds=MUCH_PATIENCE_SECONDS)
    assert all(outcome.where is not None for outcome in outcomes)
    assert _came_of("told 1", outcomes) == batches
    assert "the step is skipped" not in caplog.text


@pytest.mark.parametrize("world", in_core(("in backward 3",), ("in backward 2", "in backward 3")))
def test_ranks_stay_in_tune_when_one_breaks_off_a_backward_that_updates(world, caplog):
    """What is updated by then stays so, on all of them; the rest of the step is left out."""
    with caplog.at_level(logging.WARNING):
        at = Phase.BACKWARD, Policy.GO_ON, "Schedule.end_backward"
        outcomes, _ = broken(WORLDS[world], *at, on=1, patience_seconds=MUCH_PATIENCE_SECONDS)
    assert outcomes[1].where is not None
    assert all(outcome.weights is not None for outcome in outcomes), [outcome.refusal for outcome in outcomes]
    assert _came_of(world, outcomes) != "the ranks differ"
    assert "rank 1 has dropped gradients" in caplog.text


@pytest.mark.parametrize("on", [None, 1])
def test_gradients_are_not_unscaled_twice(on):
    """The loss scale is asked to unscale them once more, after that broke off."""
    at = Phase.CLIP, Policy.AGAIN, "DistributedComm.all_gather_rows"
    outcomes, _ = broken(WORLDS["scaled"], *at, on=on, patience_seconds=MUCH_PATIENCE_SECONDS)
    assert outcomes[1].where is not None
    assert _came_of("scaled", outcomes) == "(0, 2)"


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


@pytest.mark.full("more cases", after=2)
@pytest.mark.parametrize("settings", [{"stage": 1}, *FROM_STAGE_2])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_backward_is_not_added_to_a_part_of_one_that_broke_off(settings, at_once):
    """The next backward comes behind a forward of its own, or at once, behind one of before."""
    subject, wanted = (Sharded(models.build("mlp"), adamw, **settings) for _ in range(2))

    def loss_of(subject: Sharded, seed: int) -> torch.Tensor:
        return subject(**models.batch("mlp", seed=seed))

    def fail(_grad) -> None:
        raise RuntimeError("broken off")

    first, second = loss_of(subject, 1), loss_of(subject, 2)
    last = next(iter(subject.model.parameters())).register_hook(fail)  # of those that get a gradient
    with pytest.raises(RuntimeError, match="broken off"):
        first.backward()
    last.remove()
    (second if at_once else loss_of(subject, 2)).backward()
    loss_of(wanted, 2).backward()
    for each in (subject, wanted):
        each.optimizer.step()
    weights = wanted.weights()
    assert all(torch.equal(values, weights[name]) for name, values in subject.weights().items())


@pytest.mark.full("more cases", after=2)
@pytest.mark.parametrize("call", ["Unit.refresh", "Flat.mark_clean", "PartialStep.finish", "Schedule.end_step"])
@pytest.mark.parametrize("on", [None, 1])
def test_nobody_saves_what_a_step_has_left_torn(call, on):
    outcomes, _ = broken(WORLDS["stage 2 bf16"], Phase.STEP, Policy.SKIP, call, on=on)
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


def test_a_forward_that_broke_off_can_be_made_again():
    subject, num_calls = Sharded(models.build("mlp"), adamw, 3, offload="params"), 0
    batch = models.batch("mlp", seed=7)
    with torch.no_grad():
        wanted = subject(**batch)
        while True:
            at = Break(num_calls := num_calls + 3)
            try:
                with at.counting():
                    subject(**batch)
            except KeyboardInterrupt:
                subject.optimizer.zero_grad()
                assert torch.equal(subject(**batch), wanted), at.where
            if at.where is None:
                break
    assert num_calls > 200


def test_what_a_writeback_has_left_torn_is_not_saved():
    subject = Sharded(models.build("mlp"), adamw, 3, offload="params")
    param = next(subject.model.parameters())
    with torch.no_grad():
        at = Break("Flat.follow_written").counting()
        with pytest.raises(KeyboardInterrupt), at, hf_zero.gathered(param, writeback=True):
            param.fill_(0.5)
        with pytest.raises(LifecycleError, match=r"gathered\(writeback=True\) broke off"):
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
