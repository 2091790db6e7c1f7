"""A full disk is noticed before the first step and before each save; the former checkpoint stays."""

import pytest
import torch.distributed as dist

from hf_zero.checkpoint import check_checkpoint, plan_state, staging
from hf_zero.checkpoint.files import OpenFiles
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError
from hf_zero.trainer import start
from tests import models
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import Rows, make, seed_everything


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def usage(free: int):
    return lambda _: type("Usage", (), {"free": free})


def trained(folder, kind=3, **settings):
    seed_everything()
    trainer = make(kind, folder, models.build("bert"), Rows("bert"), **{"max_steps": 1, **settings})
    trainer.train()
    return trainer


@pytest.mark.parametrize("leaves_model", [False, True])
def test_a_run_whose_checkpoint_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch, leaves_model):
    settings = {} if leaves_model else SAVING
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    trainer.leaves_model = leaves_model
    monkeypatch.setattr(start.shutil, "disk_usage", usage(1000))
    with pytest.raises(
        CheckpointError, match=r"the run will save at least [\d.]+ KiB, but 1000 bytes are free; free space there"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_that_saves_nothing_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(start.shutil, "disk_usage", usage(0))
    assert trained(tmp_path).state.global_step == 1


@ranks(2)
def test_folders_that_ranks_do_not_share_are_refused_before_the_first_step(tmp_path):
    trainer = make(3, f"{tmp_path}/{dist.get_rank()}", models.build("bert"), Rows("bert"), **SAVING)
    with pytest.raises(CheckpointError, match="rank 1 does not see the files that rank 0 writes there; use a folder"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_what_will_be_saved_is_known_before_the_first_step(tmp_path, stage):
    trainer = make(stage, tmp_path, models.build("bert"), Rows("bert"), bf16=True, zero_offload="none", **SAVING)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        check = start.check_room
        patch.setattr(
            "hf_zero.trainer.trainer.check_room",
            lambda *args: (check(*args), seen.append(start.own_state_nbytes(trainer)))[0],
        )
        trainer.train()
    state = plan_state(engine_of(trainer.model), trainer._zero_optimizer)
    # padding of shards is counted, headers are not
    assert sum(state_of_rank[0] for state_of_rank in trainer._engine.comm.all_gather_object(seen)) == pytest.approx(
        state.files.nbytes, rel=0.15
    )


def _finds_no_room(folder, where):
    """The disk is full from step 4 on: the run ends in one line on all ranks, and the former checkpoint stays."""
    settings = {"zero_async_save": where == "background"}
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), **SAVING, **settings)
    disk_usage, write_range = staging.shutil.disk_usage, OpenFiles.write_range

    def full(*args):
        if trainer.state.global_step == 4:
            raise OSError(28, "No space left on device")
        return write_range(*args)

    with pytest.MonkeyPatch.context() as patch:
        if where == "before":
            is_full = lambda: trainer.state.global_step == 4  # noqa: E731
            patch.setattr(staging.shutil, "disk_usage", lambda path: usage(0)(path) if is_full() else disk_usage(path))
        elif dist.get_rank() == 1:
            patch.setattr(OpenFiles, "write_range", full)
        expected = "are free; free space there" if where == "before" else "No space left on device"
        with pytest.raises(CheckpointError, match=expected):
            trainer.train()


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("where", ["before", "write", "background"])
def test_a_save_that_finds_no_room_ends_the_run_and_the_former_checkpoint_stays(tmp_path, where):
    run_ranks(_finds_no_room, 2, str(tmp_path), where, timeout=120)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2"]
    check_checkpoint(tmp_path / "out" / "checkpoint-2")
