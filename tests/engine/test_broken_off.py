"""A step, a gather or a load that an exception interrupts: training goes on with right values, or nothing is saved."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import hf_zero
from hf_zero.checkpoint.conversion import Origin
from hf_zero.checkpoint.files import OpenFiles
from hf_zero.checkpoint.state import load_state
from hf_zero.comm import Pending
from hf_zero.engine import engine_of
from hf_zero.engine.flat import Flat
from hf_zero.engine.schedule import Schedule
from hf_zero.errors import CheckpointError, CommError, LifecycleError
from tests import models
from tests.distributed import ranks, run_new_ranks
from tests.tiers import more
from tests.training import Sharded, adamw


PACKAGE = str(Path(hf_zero.__file__).parent)


def _loss(subject: Sharded) -> float:
    with torch.no_grad():
        return float(subject(**models.batch("mlp", seed=7)))


def _raise(*_, **__) -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted_in(owner: type, name: str) -> Iterator[None]:
    """Interrupts the code inside the context in a method of the package."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, _raise)
        yield


@contextmanager
def interrupted_at(call: int) -> Iterator[list[str]]:
    """Interrupts the code inside the context at its n-th call of a function of the package. Yields a list of where."""
    num_calls, where = 0, []

    def trace(frame, event: str, _argument):
        nonlocal num_calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            num_calls += 1
            if num_calls == call:
                where.append(code.co_qualname)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            yield where
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_gather_or_a_forward_may_be_interrupted_anywhere(gathers):
    subject, step = Sharded(models.build("mlp"), adamw, 3, offload="params"), 7 if gathers else 5
    wanted, where, call = _loss(subject), [""], 0
    while where:
        with ExitStack() as stack, interrupted_at(call := call + step) as where:
            stack.enter_context(hf_zero.gathered(subject.model)) if gathers else _loss(subject)
        assert not any(unit.num_gathered for unit in subject.engine.units), where
        subject.optimizer.zero_grad()
        assert _loss(subject) == wanted, where
    assert call > 50


def _broken_backward(subject: Sharded, seed: int, on: int | None = None) -> None:
    """A backward that raises as it ends, on one rank or on all."""
    loss = subject(**models.batch("mlp", seed=seed))
    if on in (None, dist.get_rank() if dist.is_initialized() else 0):
        last = next(iter(subject.model.parameters())).register_hook(_raise)  # of those that get a gradient
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        last.remove()
    else:
        loss.backward()


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_a_backward_that_raises_on_one_rank_skips_the_step_on_all(stage):
    subject, wanted = (Sharded(models.build("mlp"), adamw, stage) for _ in range(2))
    before = subject.weights()
    _broken_backward(subject, 1, on=1)
    subject.clip_grad_norm_(1.0)
    subject.optimizer.step()
    assert subject.optimizer.step_was_skipped
    assert all(torch.equal(values, before[name]) for name, values in subject.weights().items())
    for each in (subject, wanted):
        each.optimizer.zero_grad()
        each(**models.batch("mlp", seed=2)).backward()
        each.optimizer.step()
    assert not subject.optimizer.step_was_skipped
    assert all(torch.equal(values, subject.weights()[name]) for name, values in wanted.weights().items())


def _raises_on_one_rank() -> None:
    subject = Sharded(models.build("mlp"), adamw, 2, shared_memory=False, timeout_seconds=3.0)
    with pytest.raises(CommError, match=f"rank {1 - dist.get_rank()} .*(does not answer|has ended)"):
        _broken_backward(subject, 1, on=1)
        subject.optimizer.step()


def test_at_stage_2_the_other_ranks_raise_too_within_the_timeout():
    run_new_ranks(_raises_on_one_rank, 2)


SETTINGS = [{"stage": 1}, {"stage": 2, "offload": "optimizer"}, *more({"stage": 3, "offload": "params"})]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("updates_early", [False, True])
def test_a_backward_is_not_added_to_a_part_of_one_that_broke_off(settings, at_once, updates_early):
    """The next backward comes behind a forward of its own, or at once, behind one of before; it may update."""
    subject, wanted = (Sharded(models.build("mlp"), adamw, **settings) for _ in range(2))
    second = subject(**models.batch("mlp", seed=2)) if at_once else None
    _broken_backward(subject, 1)
    with subject.optimizer.in_backward() if updates_early else nullcontext():
        (second if at_once else subject(**models.batch("mlp", seed=2))).backward()
    wanted(**models.batch("mlp", seed=2)).backward()
    for each in (subject, wanted):
        each.optimizer.step()
    weights = wanted.weights()
    assert all(torch.equal(values, weights[name]) for name, values in subject.weights().items())


def _trained(**settings) -> Sharded:
    subject = Sharded(models.build("mlp"), adamw, **settings)
    for seed in (1, 2):
        subject(**models.batch("mlp", seed=seed)).backward()
        subject.optimizer.step()
    return subject


@pytest.mark.parametrize("settings", [{"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}])
def test_a_backward_whose_values_an_early_update_has_changed_is_refused(settings):
    subject = _trained(**settings)
    loss = subject(**models.batch("mlp", seed=3))
    with interrupted_in(Schedule, "end_backward"), subject.optimizer.in_backward():
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


def test_an_update_that_raises_leaves_no_gradient_behind_and_nothing_to_save():
    subject = _trained(stage=2)
    subject(**models.batch("mlp", seed=3)).backward()
    with interrupted_in(torch.optim.AdamW, "step"):
        subject.optimizer.step()
    assert all(param.grad is None for group in subject.optimizer.param_groups for param in group["params"])
    with pytest.raises(LifecycleError, match="an optimizer step broke off"):
        subject.engine.check_before_save()


def test_what_a_broken_write_has_changed_is_not_saved():
    subject = _trained(stage=3, offload="params")
    param = next(subject.model.parameters())
    with torch.no_grad(), interrupted_in(Flat, "follow_written"), hf_zero.gathered(param, writeback=True):
        param.fill_(0.5)
    with pytest.raises(LifecycleError, match=r"gathered\(writeback=True\) broke off"):
        subject.engine.check_before_save()


@pytest.mark.parametrize("load", ["state", "weights"])
def test_what_a_broken_step_has_written_is_no_write_of_the_user(load, tmp_path):
    subject = _trained(stage=3, offload="params")
    engine, optimizer = subject.engine, subject.optimizer
    hf_zero.save_checkpoint(engine, optimizer, tmp_path)
    subject(**models.batch("mlp", seed=3)).backward()
    with interrupted_in(Flat, "mark_clean"):
        optimizer.step()
    load_state(engine, optimizer, tmp_path) if load == "state" else hf_zero.load_weights(engine, tmp_path)


def test_a_wait_that_is_broken_off_is_made_again_but_where_values_are_added():
    for once, num_calls in ((False, 2), (True, 1)):
        calls: list[int] = []

        def finish(calls=calls) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt

        pending = Pending(finish, once=once)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        for _ in range(2):
            pending.wait()
        assert len(calls) == num_calls


@pytest.mark.parametrize("goes_on", ["step", "backward", "zero_grad"])
def test_gradients_whose_reduction_is_broken_off_are_dropped(goes_on, caplog, monkeypatch):
    subject = Sharded(models.build("mlp"), adamw, 2, offload="optimizer")
    before = subject.weights()

    def interrupt() -> None:
        raise KeyboardInterrupt

    subject(**models.batch("mlp", seed=1)).backward()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.engine, "wait_for_host", interrupt)
        subject.clip_grad_norm_(1.0)
    with caplog.at_level(logging.WARNING):
        if goes_on == "zero_grad":
            subject.optimizer.zero_grad()
        elif goes_on == "backward":
            subject(**models.batch("mlp", seed=1))
        subject.optimizer.step()
    assert "the gradients since the last step are dropped" in caplog.text
    after = subject.weights()
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_a_load_that_breaks_off_leaves_no_former_values_and_is_not_saved(tmp_path, monkeypatch):
    subject = Sharded(models.build("mlp"), adamw, 3, offload="params")
    engine = engine_of(subject.model)
    hf_zero.save_pretrained(engine, tmp_path / "whole")
    state = {name: torch.randn_like(values) for name, values in models.build("mlp").state_dict().items()}
    (tmp_path / "other").mkdir()
    save_file(state, tmp_path / "other" / "model.safetensors")
    _loss(subject)  # the root, and the last blocks, stay in their slots
    num_read, original = [], Origin.read

    def read(*args, **kwargs) -> None:
        num_read.append(1)
        if len(num_read) > 5:
            raise OSError("the disk is gone")
        original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the disk is gone"):
        patch.setattr(Origin, "read", read)
        hf_zero.load_weights(engine, tmp_path / "other")
    loss, plain = _loss(subject), models.build("mlp")
    plain.load_state_dict(subject.weights(), strict=False)
    with torch.no_grad():
        wanted = float(plain(**models.batch("mlp", seed=7)))
    assert loss == pytest.approx(wanted, rel=1e-6), "some of what was computed with was of before the load"
    with pytest.raises(LifecycleError, match="loading the weights of .*other broke off.* load a whole checkpoint"):
        hf_zero.save_pretrained(engine, tmp_path / "mixed")
    with pytest.raises(CheckpointError):
        hf_zero.load_weights(engine, tmp_path / "nowhere")
    hf_zero.load_weights(engine, tmp_path / "whole")
    hf_zero.save_pretrained(engine, tmp_path / "again")
    with pytest.raises(CheckpointError):
        hf_zero.load_weights(engine, tmp_path / "nowhere")  # refused before anything was read
    hf_zero.save_pretrained(engine, tmp_path / "once more")


def _gone(*_, **__) -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_state_whose_load_broke_off_goes_with_its_optimizer(compute_dtype, tmp_path, monkeypatch):
    model = models.build("mlp").to(compute_dtype)  # in half precision, masters are read with the state
    subject = Sharded(model, adamw, 3, compute_dtype=compute_dtype)
    engine, optimizer = subject.engine, subject.optimizer
    subject(**models.batch("mlp", seed=1)).backward()
    optimizer.step()
    hf_zero.save_checkpoint(engine, optimizer, tmp_path / "whole")

    def refuses(what: str) -> None:
        with pytest.raises(LifecycleError, match=f"loading the {what} of .*whole broke off"):
            hf_zero.save_pretrained(engine, tmp_path / "mixed")

    def break_off(name: str) -> None:
        original = OpenFiles.read_range

        def read(files, key, *args) -> None:
            original(files, key, *args) if name not in key else _gone()

        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the disk is gone"):
            patch.setattr(OpenFiles, "read_range", read)
            load_state(engine, optimizer, tmp_path / "whole")

    break_off("exp_avg_sq")
    refuses("state")
    load_state(engine, optimizer, tmp_path / "whole")
    hf_zero.save_pretrained(engine, tmp_path / "again")
    if compute_dtype is not None:
        last = engine.param_infos()[-1].name
        with monkeypatch.context() as patch, pytest.raises(CheckpointError):
            patch.setattr(OpenFiles, "check_shape", lambda files, key, *_: _gone() if key == last else None)
            load_state(engine, optimizer, tmp_path / "whole")
        refuses("weights")
    else:
        break_off("exp_avg_sq")
    hf_zero.load_weights(engine, tmp_path / "whole")
    refuses("state")
    newer = hf_zero.ShardedOptimizer(subject.model, torch.optim.AdamW)
    hf_zero.save_checkpoint(engine, newer, tmp_path / "newer")
