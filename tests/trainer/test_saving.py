"""When a trainer saves: whole or not at all, in the background; which checkpoint it goes on from."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from hf_zero.checkpoint import check_checkpoint, plan_state, plan_weights, staging
from hf_zero.checkpoint.manifest import run_of
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.comm.distributed import DistributedComm
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, CommError
from hf_zero.trainer import start
from hf_zero.trainer.checkpoints import load_parameters
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import Rows, make, record, seed_everything, train


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def _names(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def _saves_in_background(folder):
    run = train(3, f"{folder}/here", **SAVING)
    aside = train(3, f"{folder}/aside", zero_async_save=True, **SAVING)
    assert_equal(aside, run, "saving in the background and not")
    dist.barrier()
    resumed = train(2, f"{folder}/aside", resume=f"{folder}/aside/checkpoint-2", **{**SAVING, "save_strategy": "no"})
    assert_equal(resumed, run, "resumed and unbroken")


def test_a_save_in_the_background_is_the_same_save(tmp_path):
    run_ranks(_saves_in_background, 2, str(tmp_path), timeout=240)
    assert _names(tmp_path / "aside") == _names(tmp_path / "here") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for step in (2, 4, 6):
        for name in ("model.safetensors", "zero/optimizer.safetensors"):
            one, other = (tmp_path / mode / f"checkpoint-{step}" / name for mode in ("here", "aside"))
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name, has_adapter", [("bert", False), ("mixtral", False), ("llama", True)])
@ranks(2)
def test_a_checkpoint_takes_four_collectives_of_objects(tmp_path, name, has_adapter):
    """The optimizer's state, the temporary folder, the written files, and the new name."""
    seed_everything()
    model = models.build(name)
    if has_adapter:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, modules_to_save=["lm_head"], target_modules=["q_proj"])
        )
    trainer = make(3, tmp_path, model, Rows(name), **SAVING)
    trainer.train()
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast_object"):
            original = getattr(DistributedComm, name)

            def exchange(self, *args, original=original, **kwargs):
                counted.append(kwargs.get("what"))
                return original(self, *args, **kwargs)

            patch.setattr(DistributedComm, name, exchange)
        for trainer.state.best_global_step in (None, 2):
            counted.clear()
            trainer._save_checkpoint(trainer.model, None)
            assert len(counted) == 4, counted


@ranks(2)
def test_a_failure_of_rank_0_is_raised_on_all_ranks_also_where_trainer_waits_for_them(tmp_path):
    def fail(folder):
        raise OSError(28, "No space left on device")

    seed_everything()
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **SAVING)
    trainer.train()
    for trainer.state.best_global_step in (None, 2):
        if dist.get_rank() == 0:
            trainer._save = fail
        with pytest.raises(CheckpointError, match="No space left"):
            trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.save_model(f"{tmp_path}/model")
    assert os.path.isfile(f"{tmp_path}/model/model.safetensors")  # what was trained is not lost


@ranks(2)
def test_a_failure_of_rank_0_in_writing_adapters_is_raised_on_all_ranks_too(tmp_path):
    """Before it, Trainer's own write has a collective."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for in_background in (False, True):
        seed_everything()
        model = get_peft_model(models.build("bert"), LoraConfig(target_modules=["query"]))
        settings = {**SAVING, "save_strategy": "no", "zero_async_save": in_background}
        trainer = make(3, tmp_path / str(in_background), model, Rows("bert"), **settings)
        trainer.train()
        if dist.get_rank() == 0:
            trainer.model.save_pretrained = fail
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match="No space left"):
            trainer._save_checkpoint(trainer.model, None)
        assert time.monotonic() - begin < 30.0


def _records(folder):
    train(3, folder, **{**SAVING, "gradient_accumulation_steps": 2})


def test_the_record_has_loss_and_norm_of_the_last_step(tmp_path):
    run_ranks(_records, 2, str(tmp_path), timeout=240)
    run = run_of(tmp_path / "checkpoint-4")
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    logged = {entry["step"]: entry for entry in history}
    place = {"step": 4, "epoch": 1, "batch": 2, "rows": 4, "accumulation": 2, "order": None}
    assert run.step == 4 and run.extra["place"] == place
    assert run.loss == pytest.approx(logged[4]["loss"], rel=1e-3)
    assert run.grad_norm == pytest.approx(logged[4]["grad_norm"], rel=1e-6)


class Interrupted:
    """A tokenizer, in whose first save comes a Ctrl-C."""

    is_saved = False

    def save_pretrained(self, folder):
        if not self.is_saved:
            self.is_saved = True
            raise KeyboardInterrupt


def _is_interrupted(folder):
    seed_everything()
    parts = {"processing_class": Interrupted()}
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), parts=parts, **SAVING)
    with pytest.raises((KeyboardInterrupt, CommError)):
        trainer.train()
    trainer.save_model(f"{folder}/model")


def test_a_model_is_saved_after_a_checkpoint_that_was_interrupted(tmp_path):
    run_ranks(_is_interrupted, 2, str(tmp_path), timeout=100)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not list((tmp_path / "out").iterdir()), "of the checkpoint nothing is left"


@pytest.mark.quick
@ranks(2, timeout=240)
def test_no_checkpoint_to_resume_from_is_one_line(tmp_path):
    """As the ValueError that Trainer raises, and as ours."""
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **SAVING)
    for resume in (True, f"{tmp_path}/nowhere", tmp_path):
        with pytest.raises(ValueError):
            trainer.train(resume_from_checkpoint=resume)
    with pytest.raises(CheckpointError, match="nowhere: does not exist; resume from another"):
        trainer.train(resume_from_checkpoint=f"{tmp_path}/nowhere")
    with pytest.raises(CheckpointError, match="has no complete checkpoint to resume from; start"):
        trainer.train(resume_from_checkpoint=True)
    Path(tmp_path, "checkpoint-2").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=r"resume from \(checkpoint-2: .*found neither .*\); start a new run"):
        trainer.train(resume_from_checkpoint=True)


def _best(folder, only_model, aside):
    settings = {
        **SAVING,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_only_model": only_model,
        "save_total_limit": 1,
        "learning_rate": 0.3,  # diverges: the first is the best
        "zero_async_save": aside,
        "parts": {"eval_dataset": Rows("bert", 6)},
    }
    seed_everything()
    trainer = make(3, folder, models.build("bert"), Rows("bert"), **settings)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert Path(best).parent == Path(folder)
    loaded = type(trainer.model).from_pretrained(best)
    weights = record(trainer).weights
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, weights[name])
    return best


@pytest.mark.parametrize("only_model, aside", [(False, False), (True, True)])
def test_the_best_model_is_read_back_also_when_only_models_are_saved(tmp_path, only_model, aside):
    best, _ = run_ranks(_best, 2, str(tmp_path), only_model, aside, timeout=240)
    state = json.loads(Path(best, "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best
    assert os.path.exists(f"{best}/zero") != only_model


@ranks(1)
def test_a_users_own_handler_stays(tmp_path):

    def own(number, frame):
        pass

    signal.signal(signal.SIGUSR1, own)
    try:
        train(3, tmp_path, max_steps=1)
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@ranks(2, timeout=240)
def test_a_model_is_given_by_its_folder(tmp_path):
    """From a folder and from a model in memory: the same run."""
    name = "llama-tied"
    seed_everything()
    model = models.build(name)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{tmp_path}/base")
    dist.barrier()
    loaded = type(model).from_pretrained(f"{tmp_path}/base", dtype="auto").train()
    expected = train(3, f"{tmp_path}/model", name, model=loaded)
    for given in (f"{tmp_path}/base", Path(tmp_path, "base")):
        seed_everything()
        trainer = make(3, f"{tmp_path}/name", given, Rows(name))
        assert all(p.device.type == "meta" for p in trainer.model.parameters())
        trainer.train()
        assert type(trainer.model) is type(model)
        assert_equal(record(trainer), expected, "loaded by every rank in ranges, and whole")
    with pytest.raises(CheckpointError, match="nowhere: the model cannot be loaded"):
        make(3, tmp_path, f"{tmp_path}/nowhere", Rows(name))


@ranks(2, timeout=60)
def test_parameters_that_one_rank_misses_are_missed_by_all(tmp_path):
    """On one of the disks."""
    folder = str(tmp_path)
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"))
    engine = trainer.accelerator.shard(trainer.model)
    own = Path(folder, str(engine.comm.rank))
    own.mkdir()
    if engine.comm.rank == 0:
        (own / "parameters.safetensors").touch()
    with pytest.raises(CheckpointError, match="has no parameters.safetensors"):
        load_parameters(engine, own)


def test_only_a_trainer_that_writes_the_model_itself_has_an_evaluator_that_needs_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.trainer.trainer.gathered", lambda _: pytest.fail("the model is gathered"))
    trainer = make(3, tmp_path, models.build("bert"), parts={"eval_dataset": Rows("bert")})
    trainer.evaluator = object()
    assert trainer.evaluate()["eval_loss"] > 0


# A full disk is noticed before the first step and before each save; the former checkpoint stays


BRIEF = {**SAVING, "max_steps": 4}


def usage(free: int):
    return lambda _: type("Usage", (), {"free": free})


def trained(folder, kind=3, **settings):
    seed_everything()
    trainer = make(kind, folder, models.build("bert"), Rows("bert"), **{"max_steps": 1, **settings})
    trainer.train()
    return trainer


@pytest.mark.parametrize("leaves_model", [False, True])
def test_a_run_whose_checkpoint_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch, leaves_model):
    settings = {} if leaves_model else BRIEF
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
    trainer = make(3, f"{tmp_path}/{dist.get_rank()}", models.build("bert"), Rows("bert"), **BRIEF)
    with pytest.raises(CheckpointError, match="rank 1 does not see the files that rank 0 writes there; use a folder"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_what_will_be_saved_is_known_before_the_first_step(tmp_path, stage):
    trainer = make(stage, tmp_path, models.build("bert"), Rows("bert"), bf16=True, zero_offload="none", **BRIEF)
    seen, find = [], start.checkpoint_nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "checkpoint_nbytes", lambda *args: seen.append(find(*args)) or seen[-1])
        trainer.train()
    engine = engine_of(trainer.model)
    saved = plan_weights(engine).files.nbytes + plan_state(engine, trainer._zero_optimizer).files.nbytes
    assert seen == [pytest.approx(saved, rel=0.15)]  # padding of shards is counted, headers are not


def _finds_no_room(folder, where):
    """The disk is full from step 4 on: the run ends in one line on all ranks, and the former checkpoint stays."""
    settings = {"zero_async_save": where == "background"}
    trainer = make(3, f"{folder}/out", models.build("bert"), Rows("bert"), **BRIEF, **settings)
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
