"""A full disk: noticed before the first step, and at the end it costs time and not the model."""

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import BertForSequenceClassification

from hf_zero.checkpoint import plan_state, staging
from hf_zero.checkpoint.open_files import OpenFiles
from hf_zero.errors import CheckpointError, ConfigError, HubError
from hf_zero.trainer import room
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
        patch.setattr(room.logger, "handlers", [self])

    def emit(self, record):
        self.said.append(record.getMessage())


@pytest.mark.parametrize("leaves_model", [False, True])
def test_a_run_whose_checkpoint_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch, leaves_model):
    settings = {} if leaves_model else SAVING
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    trainer.leaves_model = leaves_model
    monkeypatch.setattr(room.shutil, "disk_usage", usage(1000))
    with pytest.raises(CheckpointError, match="the run will save .* MiB at least, 0 MiB are free; free space there"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_that_saves_nothing_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(room.shutil, "disk_usage", usage(0))
    assert trained(tmp_path).state.global_step == 1


def test_a_run_whose_checkpoints_do_not_all_fit_is_warned(tmp_path, monkeypatch):
    warnings = Warnings(monkeypatch)
    checkpoint = 300_000  # more than the model of some 70 kB with its state
    monkeypatch.setattr(room.shutil, "disk_usage", usage(checkpoint))
    trained(tmp_path, **SAVING, save_total_limit=1)
    assert "2 checkpoints of 0 MiB will not fit with the 0 MiB that are free; save_total_limit" in warnings.said[0]


def _sizes(folder, stage):
    trainer = make(stage, folder, models.build("bert"), Rows("bert"), bf16=True, zero_offload="none", **SAVING)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        check = room.check_room
        patch.setattr(
            "hf_zero.trainer.trainer.check_room",
            lambda *args: (check(*args), seen.append(room.state_nbytes(trainer)))[0],
        )
        trainer.train()
    state = plan_state(trainer.zero_engine, trainer._zero_optimizer)
    # padding of shards is counted, headers are not
    assert seen[0] == pytest.approx(state.part.files.nbytes, rel=0.15)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_will_be_saved_is_known_before_the_first_step(tmp_path, stage):
    run_ranks(_sizes, 2, str(tmp_path), stage)


def _waits(folder, where):
    trainer = trained(f"{folder}/out")
    with pytest.MonkeyPatch.context() as patch:
        warnings, num_looks = Warnings(patch), []
        patch.setattr(room, "LOOK_SECONDS", 0.05)

        def full(*args):
            num_looks.append(args)
            if len(num_looks) < 3:
                raise OSError(28, "No space left on device")
            return original(*args)

        if where == "space":
            patch.setattr(staging.shutil, "disk_usage", lambda path: usage(0 if len(num_looks) < 3 else 2**40)(path))
            patch.setattr(room.time, "sleep", num_looks.append)
        elif dist.get_rank() == (1 if where == "write" else 0):
            owner, name = (OpenFiles, "write_range") if where == "write" else (Path, "write_bytes")
            original = getattr(owner, name)
            patch.setattr(owner, name, full)
        trainer.save_model()
    assert_saved(trainer, f"{folder}/out")
    return warnings.said


@pytest.mark.parametrize("where", ["space", "write", "beside"])
def test_a_model_that_has_no_room_waits_for_it(tmp_path, where):
    said, silent = run_ranks(_waits, 2, str(tmp_path), where)
    assert len(said) == 1 and "out: no room for the model" in said[0] and not silent
    assert ("MiB are missing" in said[0]) == (where == "space")


def _gives_up(folder):
    trainer = trained(f"{folder}/out")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "LOOK_SECONDS", 0.05)
        patch.setattr(staging.shutil, "disk_usage", usage(0))
        if dist.get_rank() == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped) as stopped:
            trainer.save_model()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    trainer.save_model()
    assert_saved(trainer, f"{folder}/out")


def test_a_signal_to_one_rank_gives_up_on_all(tmp_path):
    run_ranks(_gives_up, 2, str(tmp_path))


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
