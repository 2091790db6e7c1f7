"""An exception within a wait, as Ctrl-C raises it anywhere: what was waited for does not count as done."""

import logging
import threading

import pytest
import torch
from safetensors.torch import save_file

import hf_zero
from hf_zero.checkpoint.conversion import Origin
from hf_zero.checkpoint.files import OpenFiles
from hf_zero.checkpoint.state import load_state
from hf_zero.comm import Bus, Counters, Pending
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, LifecycleError
from tests import models
from tests.training import Sharded, adamw


class Late(Pending):
    """A copy that is made when it is waited for, and not before."""

    def __init__(self, finish):
        super().__init__(finish)
        self.synchronize = self.wait


NUM_UNITS = 5  # four blocks, and the root


def _loss(subject: Sharded) -> float:
    with torch.no_grad():
        return float(subject(**models.batch("mlp", seed=7)))


@pytest.fixture
def interrupts(monkeypatch) -> list[int]:
    """Copies to the device are made when they are waited for. What is put in this list counts the waits before one is
    broken off."""
    left: list[int] = []

    def up(bus, device, host) -> Pending:
        def finish() -> None:
            if left and left[0] == 0:
                left.pop()
                raise KeyboardInterrupt
            if left:
                left[0] -= 1
            device.copy_(host)

        return Late(finish)

    monkeypatch.setattr(Bus, "up", up)
    return left


@pytest.mark.quick
def test_a_gather_that_is_broken_off_is_waited_for_again(interrupts):
    subject = Sharded(models.build("mlp"), adamw, 3, offload="params")
    wanted = _loss(subject)
    for count in range(NUM_UNITS):
        subject.engine.evict_all()
        interrupts.append(count)
        with pytest.raises(KeyboardInterrupt):
            _loss(subject)
        assert _loss(subject) == wanted, f"after the interruption of wait {count}"


def test_a_gather_that_could_not_begin_is_begun_anew(monkeypatch):
    subject = Sharded(models.build("mlp"), adamw, 3, offload="params")
    wanted, original = _loss(subject), Bus.up
    for count in range(NUM_UNITS):
        subject.engine.evict_all()
        left = [count]

        def up(bus, device, host, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return original(bus, device, host)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Bus, "up", up)
            _loss(subject)
        assert _loss(subject) == wanted, f"after the interruption of gather {count}"


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


def test_jobs_go_on_when_the_wait_for_them_is_broken_off(monkeypatch):
    bus, may_end, done = Bus(torch.device("cpu"), Counters()), threading.Event(), []
    job = bus.later(lambda: (may_end.wait(), done.append(True)))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job, "wait", interrupt)
        bus.wait_for_jobs()
    may_end.set()
    bus.wait_for_jobs()
    assert done, "the next wait is for the same job"


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


def _interrupted(*_, **__) -> None:
    raise KeyboardInterrupt


def test_a_part_whose_load_broke_off_is_not_saved_before_it_is_loaded(tmp_path, monkeypatch):
    model = models.build("mlp")
    model.embed.register_buffer("factor", torch.ones(2))
    subject = Sharded(model, adamw, 3)
    engine = subject.engine
    hf_zero.save_pretrained(engine, tmp_path / "whole")
    names = [info.name for info in engine.param_infos()]
    first, second = ({name: name for name in part} for part in (names[:3] + ["embed.factor"], names[3:]))

    def break_off() -> None:
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the disk is gone"):
            patch.setattr(Origin, "read", _gone)
            hf_zero.load_weights(engine, tmp_path / "whole", strict=False, keys=first)

    break_off()
    hf_zero.load_weights(engine, tmp_path / "whole", strict=False, keys=second)
    with pytest.raises(LifecycleError, match="whole broke off.* load a whole checkpoint, or these weights with"):
        hf_zero.save_pretrained(engine, tmp_path / "mixed")
    hf_zero.load_weights(engine, tmp_path / "whole")
    hf_zero.save_pretrained(engine, tmp_path / "again")


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
