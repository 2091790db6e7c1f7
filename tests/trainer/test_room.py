"""A full disk: noticed before the first step, and later it costs time and neither steps nor the model."""

import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from transformers import BertForSequenceClassification

from hf_zero.checkpoint import check_checkpoint, plan_state, staging
from hf_zero.checkpoint.files import OpenFiles
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, CommError, ConfigError, HubError
from hf_zero.trainer import disk_space
from hf_zero.trainer.signals import Stopped
from tests import models
from tests.distributed import run_ranks
from tests.trainer.harness import Rows, make, seed_everything, weights_of


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def usage(free: int):
    return lambda _: type("Usage", (), {"free": free})


def trained(folder, kind=3, **settings):
    seed_everything()
    trainer = make(kind, folder, models.build("bert"), Rows("bert"), **{"max_steps": 1, **settings})
    trainer.train()
    return trainer


def assert_saved(trainer, folder) -> None:
    weights = weights_of(trainer.model)
    if dist.get_rank() == 0 if dist.is_initialized() else True:
        loaded = BertForSequenceClassification.from_pretrained(folder)
        assert all(param.equal(weights[name]) for name, param in loaded.named_parameters())
        assert Path(folder, "training_args.bin").exists()


class Warnings(logging.Handler):
    def __init__(self, patch):
        super().__init__()
        self.said = []
        patch.setattr(disk_space.logger, "handlers", [self])

    def emit(self, record):
        self.said.append(record.getMessage())


@pytest.mark.parametrize("leaves_model", [False, True])
def test_a_run_whose_checkpoint_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch, leaves_model):
    settings = {} if leaves_model else SAVING
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    trainer.leaves_model = leaves_model
    monkeypatch.setattr(disk_space.shutil, "disk_usage", usage(1000))
    with pytest.raises(
        CheckpointError, match=r"the run will save [\d.]+ KiB at least, 1000 bytes are free; free space there"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_that_saves_nothing_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space.shutil, "disk_usage", usage(0))
    assert trained(tmp_path).state.global_step == 1


def test_a_run_whose_checkpoints_do_not_all_fit_is_warned(tmp_path, monkeypatch):
    warnings = Warnings(monkeypatch)
    checkpoint = 300_000  # more than the model of some 70 kB with its state
    monkeypatch.setattr(disk_space.shutil, "disk_usage", usage(checkpoint))
    trained(tmp_path, **SAVING, save_total_limit=1)
    expected = r"2 checkpoints of \d+\.\d KiB will not fit with the 293\.0 KiB that are free; save_total_limit"
    assert re.search(expected, warnings.said[0])


def counted(done=0, max_steps=20, strategy="steps", save_steps=5, epochs=3, epoch=None, limit=None) -> int:
    args = SimpleNamespace(save_strategy=strategy, save_steps=0.1, num_train_epochs=100, save_total_limit=limit)
    state = SimpleNamespace(
        global_step=done, max_steps=max_steps, save_steps=save_steps, num_train_epochs=epochs, epoch=epoch
    )
    return disk_space._num_checkpoints(args, state)


def test_checkpoints_are_counted_as_they_will_be_saved():
    assert counted() == 4  # by the state's steps: those of the arguments may be a share
    assert counted(max_steps=21) == 5  # the last step saves too
    assert counted(done=10, max_steps=21) == 3
    assert counted(done=20) == counted(strategy="no") == 0
    assert counted(strategy="epoch") == 3  # those that max_steps leaves
    assert counted(done=10, strategy="epoch", epoch=1.5) == 2
    assert counted(strategy="epoch", epochs=sys.maxsize) == counted(strategy="best") == 1
    assert counted(limit=2) == 3


def _sizes(folder, stage):
    trainer = make(stage, folder, models.build("bert"), Rows("bert"), bf16=True, zero_offload="none", **SAVING)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        check = disk_space.check_room
        patch.setattr(
            "hf_zero.trainer.batches.check_room",
            lambda *args: (check(*args), seen.append(disk_space.state_nbytes(trainer)))[0],
        )
        trainer.train()
    state = plan_state(engine_of(trainer.model), trainer._zero_optimizer)
    # padding of shards is counted, headers are not
    assert seen[0] == pytest.approx(state.files.nbytes, rel=0.15)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_will_be_saved_is_known_before_the_first_step(tmp_path, stage):
    run_ranks(_sizes, 2, str(tmp_path), stage)


def _waits(folder, where):
    trainer = trained(f"{folder}/out")
    with pytest.MonkeyPatch.context() as patch:
        warnings, num_looks = Warnings(patch), []
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)

        def full(*args):
            num_looks.append(args)
            if len(num_looks) < 3:
                raise OSError(28, "No space left on device")
            return original(*args)

        if where == "space":
            patch.setattr(staging.shutil, "disk_usage", lambda path: usage(0 if len(num_looks) < 3 else 2**40)(path))
            patch.setattr(disk_space.time, "sleep", num_looks.append)
        elif dist.get_rank() == (1 if where == "write" else 0):
            owner, name = (OpenFiles, "write_range") if where == "write" else (Path, "write_bytes")
            original = getattr(owner, name)
            patch.setattr(owner, name, full)
        trainer.save_model()
    assert_saved(trainer, f"{folder}/out")
    return warnings.said


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("where", ["space", "write", "beside"])
def test_a_model_that_has_no_room_waits_for_it(tmp_path, where):
    said, silent = run_ranks(_waits, 2, str(tmp_path), where)
    assert len(said) == 1 and "out: no room for the model" in said[0] and not silent
    assert (" KiB are missing" in said[0]) == (where == "space")


def _names(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _checkpoint_waits(folder, at, aside):
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), zero_async_save=aside, **SAVING)
    write_range, num_tries = OpenFiles.write_range, []

    def full(*args):
        if trainer.state.global_step == at and len(num_tries) < 3:
            num_tries.append(at)
            raise OSError(28, "No space left on device")
        return write_range(*args)

    with pytest.MonkeyPatch.context() as patch:
        warnings = Warnings(patch)
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)
        if dist.get_rank() == 1:
            patch.setattr(OpenFiles, "write_range", full)
        trainer.train()
    return warnings.said, len(num_tries)


@pytest.mark.parametrize("at, aside", [(2, False), (4, False), (4, True)])
def test_a_checkpoint_that_has_no_room_waits_for_it(tmp_path, at, aside):
    (said, _), (_, num_tries) = run_ranks(_checkpoint_waits, 2, str(tmp_path), at, aside)
    assert num_tries == 3 and len(said) == 1
    assert f"checkpoint-{at}: no room for the checkpoint; free space there" in said[0]
    for step in (2, 4):
        check_checkpoint(tmp_path / "out" / f"checkpoint-{step}")


def _is_left_out_in_background(folder):
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), zero_async_save=True, **SAVING)
    write_range = OpenFiles.write_range

    def full(*args):
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
        return write_range(*args)

    wait = trainer._saver.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFiles, "write_range", full)

        def end_step(*args, **kwargs):  # the thread is over before the next step, and not waited for
            if trainer._saver._written is not None:
                trainer._saver._written._thread.join()

        trainer.callback_handler.callbacks[0].on_save = end_step
        trainer.train()
    assert wait().name == "checkpoint-4"


def test_a_checkpoint_that_found_no_room_in_the_background_does_not_end_the_run(tmp_path):
    run_ranks(_is_left_out_in_background, 2, str(tmp_path))
    assert _names(tmp_path / "out") == ["checkpoint-4"]
    check_checkpoint(tmp_path / "out" / "checkpoint-4")


def _checkpoint_falls_back(folder):
    settings = {
        **SAVING,
        "zero_save_fallback": f"{folder}/spare",
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "load_best_model_at_end": True,
        "parts": {"eval_dataset": Rows("bert", 6)},
    }
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), **settings)
    original = staging.shutil.disk_usage

    def disk_usage(path):
        is_full = trainer.state.global_step and "spare" not in str(path)
        return usage(0)(path) if is_full else original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.shutil, "disk_usage", disk_usage)
        trainer.train()
    assert trainer.state.best_model_checkpoint == f"{folder}/spare/out/checkpoint-4"
    assert_saved(trainer, f"{folder}/spare/out/checkpoint-4")


def test_a_checkpoint_that_has_no_room_goes_to_the_folder_for_such_cases(tmp_path):
    run_ranks(_checkpoint_falls_back, 2, str(tmp_path))
    check_checkpoint(tmp_path / "spare" / "out" / "checkpoint-4")


def _is_interrupted_in_fallback(folder):
    trainer = trained(f"{folder}/out", zero_save_fallback=f"{folder}/spare")
    original = staging.shutil.disk_usage
    is_leaving = dist.get_rank() == 1

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)
        patch.setattr(
            staging.shutil, "disk_usage", lambda path: original(path) if "spare" in str(path) else usage(0)(path)
        )
        if is_leaving:
            patch.setattr(OpenFiles, "write_range", interrupt)
        with pytest.raises(KeyboardInterrupt if is_leaving else CommError) as caught:
            trainer._save_checkpoint(trainer.model, None)
    assert is_leaving or "rank 1 was interrupted (KeyboardInterrupt)" in str(caught.value)


def test_an_interrupt_in_the_folder_for_such_cases_ends_the_save_on_all_ranks(tmp_path):
    run_ranks(_is_interrupted_in_fallback, 2, str(tmp_path), timeout=60)


def _fails_in_background(folder):
    seed_everything()
    trainer = trained(f"{folder}/out", zero_async_save=True)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OpenFiles, "write_range", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        trainer._save_checkpoint(trainer.model, None)
        trainer._saver._written._thread.join()
    trainer.save_model()
    assert_saved(trainer, f"{folder}/out")


def test_a_checkpoint_that_failed_in_the_background_does_not_keep_the_model_from_being_saved(tmp_path):
    run_ranks(_fails_in_background, 2, str(tmp_path))


def _signal_to_another_than(handler):
    """Sends SIGTERM to this process once its handler is another, which is while it saves."""
    while signal.getsignal(signal.SIGTERM) is handler:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def _gives_up(folder):
    trainer = trained(f"{folder}/out")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)
        patch.setattr(staging.shutil, "disk_usage", usage(0))
        if dist.get_rank() == 1:
            threading.Thread(target=_signal_to_another_than, args=(handler,)).start()
        with pytest.raises(Stopped) as stopped:
            trainer.save_model()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    trainer.save_model()
    assert_saved(trainer, f"{folder}/out")


def test_a_signal_to_one_rank_gives_up_on_all(tmp_path):
    run_ranks(_gives_up, 2, str(tmp_path))


def _gives_up_a_checkpoint(folder):
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), **SAVING)
    original, timers = staging.shutil.disk_usage, []

    def disk_usage(path):
        if trainer.state.global_step < 4:
            return original(path)
        if not timers:  # once the disk is full
            timers.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)))
            timers[0].start()
        return usage(0)(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)
        patch.setattr(staging.shutil, "disk_usage", disk_usage)
        with pytest.raises(Stopped) as stopped:
            trainer.train()
    assert stopped.value.code == 128 + signal.SIGTERM


def test_a_signal_gives_up_a_checkpoint_that_has_no_room_and_the_former_one_stays(tmp_path):
    run_ranks(_gives_up_a_checkpoint, 2, str(tmp_path))
    assert _names(tmp_path / "out") == ["checkpoint-2"]
    check_checkpoint(tmp_path / "out" / "checkpoint-2")


def _falls_back(folder):
    trainer = trained(f"{folder}/out", zero_save_fallback=f"{folder}/spare", hub_model_id="somebody/model")
    original = staging.shutil.disk_usage
    if dist.get_rank() == 0:
        Path(folder, "spare", "out").mkdir(parents=True)
        Path(folder, "spare", "out", "of another run").touch()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            staging.shutil, "disk_usage", lambda path: original(path) if "spare" in str(path) else usage(0)(path)
        )
        trainer.save_model()
    assert_saved(trainer, f"{folder}/spare/out-2")
    assert not Path(folder, "out", "model.safetensors").exists()
    with pytest.raises(HubError, match=r"the model is in .*spare/out-2, as .*out had no room for it; push"):
        trainer.push_to_hub()
    trainer.save_model()
    assert_saved(trainer, f"{folder}/out")
    assert trainer.saved_elsewhere is None


def test_a_model_that_has_no_room_goes_to_the_folder_for_such_cases(tmp_path):
    run_ranks(_falls_back, 2, str(tmp_path))


def _raises(folder):
    trainer = trained(f"{folder}/out")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OpenFiles, "write_range", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match="Input/output error"):
            trainer.save_model()


def test_another_failure_is_raised_at_once(tmp_path):
    run_ranks(_raises, 2, str(tmp_path))


def test_a_fallback_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="zero_save_fallback .* is not a folder"):
        make(3, tmp_path, models.build("bert"), Rows("bert"), zero_save_fallback=str(tmp_path / "file"))


def _cannot_fall_back(folder, where):
    trainer = trained(f"{folder}/out", zero_save_fallback=f"{folder}/spare")
    disk_usage, num_looks = staging.shutil.disk_usage, []
    if where == "writing" and dist.get_rank() == 0:
        Path(folder, "spare").touch()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        warnings = Warnings(patch)
        patch.setattr(disk_space, "LOOK_SECONDS", 0.05)
        patch.setattr(disk_space.time, "sleep", num_looks.append)
        patch.setattr(staging.shutil, "disk_usage", lambda path: disk_usage(path) if num_looks[2:] else usage(0)(path))
        if where == "choosing" and dist.get_rank() == 0:
            patch.setattr("hf_zero.trainer.disk_space.fallback_of", lambda *_: os.stat(f"{folder}/nowhere"))
        trainer.save_model()
    assert_saved(trainer, f"{folder}/out")
    return warnings.said


@pytest.mark.parametrize("where", ["choosing", "writing"])
def test_a_fallback_that_cannot_be_used_leaves_the_first_folder_to_wait_for(tmp_path, where):
    said, silent = run_ranks(_cannot_fall_back, 2, str(tmp_path), where)
    assert "zero_save_fallback is not used any more: " in said[0] and "out: no room for the model" in said[1]
    assert len(said) == 2 and not silent


def test_what_is_no_empty_folder_is_not_fallen_back_to(tmp_path):
    (tmp_path / "out").touch()
    (tmp_path / "out-2").symlink_to(tmp_path / "nowhere")
    assert disk_space.fallback_of(str(tmp_path), "elsewhere/out") == str(tmp_path / "out-3")
    (tmp_path / "out-3" / "checkpoint-2").mkdir(parents=True)
    assert disk_space.fallback_of(str(tmp_path), "elsewhere/out") == str(tmp_path / "out-4")
    assert disk_space.fallback_of(str(tmp_path), "elsewhere/out", "checkpoint-4") == str(
        tmp_path / "out-3" / "checkpoint-4"
    )


def test_nobody_is_asked_for_room_when_ranks_cannot_be_reached():
    def save():
        raise CommError("rank 1 has ended")

    with pytest.raises(CommError, match="rank 1 has ended"):
        disk_space.lack_of_room(None, save)
