"""A checkpoint as a whole: atomic, checked, in the background."""

import os
import threading
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint import (
    Checkpoint,
    Manifest,
    Snapshots,
    check_checkpoint,
    folders,
    load_state,
    load_weights,
    plan_state,
    plan_weights,
    save_checkpoint,
    save_pretrained,
    staging,
)
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.subjects import fill, flip, optimizer_of, run_ranks, sharded, world_of_one
from tests.distributed import ranks


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save(comm, folder, name="checkpoint-1", background=None, **facts):
    engine = sharded(models.tied_llama(), half=True)
    return save_checkpoint(engine, optimizer_of(engine), folder / name, background=background, **facts)


@pytest.mark.quick
def test_the_folder_holds_model_state_and_record(tmp_path):
    run_ranks(save, 2, tmp_path)
    folder = tmp_path / "checkpoint-1"
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert set(content_of(folder)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "zero/master.safetensors",
        "zero/optimizer.safetensors",
        "zero_manifest.json",
    }
    files = Manifest.read(folder).files
    others = set(content_of(folder)) - {"zero_manifest.json"}
    assert {name: found.nbytes for name, found in files.items()} == {
        name: (folder / name).stat().st_size for name in others
    }
    check_checkpoint(folder)
    assert models.tied_llama().from_pretrained(folder).config.vocab_size == 61


def test_a_save_replaces_what_was_saved_under_its_name(tmp_path):
    folder = tmp_path / "checkpoint-1"
    for is_first in (True, False):
        checkpoint = begin(tmp_path)
        if is_first:
            (checkpoint.path / "stale.txt").touch()
        checkpoint.finish()
        (folder / "README.md").touch()
        (folder / ".hidden").touch()
        assert (folder / "stale.txt").exists() == is_first
        check_checkpoint(folder)
    assert os.listdir(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("when", ["before", "meanwhile", "without a save"])
def test_a_folder_with_files_that_no_save_has_written_is_not_replaced(tmp_path, when):
    folder = tmp_path / "checkpoint-1"
    if when != "without a save":
        save(world_of_one(), tmp_path)
    checkpoint = begin(tmp_path) if when == "meanwhile" else None
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "today.txt").write_text("mine")
    before = content_of(folder)
    with pytest.raises(CheckpointError, match=r"has files not saved by hf_zero \(notes/today.txt\)"):
        checkpoint.finish() if checkpoint is not None else begin(tmp_path)
    assert content_of(folder) == before
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_a_file_beside_the_checkpoint_that_has_the_name_of_the_weights_is_refused(tmp_path):
    checkpoint = begin(tmp_path, "tensors")
    (checkpoint.path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="model.safetensors: was written beside the checkpoint"):
        checkpoint.finish()
    assert os.listdir(tmp_path) == []


def test_a_link_is_replaced_by_a_checkpoint_and_what_it_led_to_stays(tmp_path):
    save(world_of_one(), tmp_path / "elsewhere")
    before = content_of(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to("elsewhere/checkpoint-1")
    for _ in range(2):
        save(world_of_one(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "elsewhere"]
    assert not (tmp_path / "checkpoint-1").is_symlink() and content_of(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors", "pytorch_model.bin"])
def test_a_checkpoint_without_a_manifest_is_replaced_whole(tmp_path, name):
    (tmp_path / "checkpoint-1").mkdir()
    for each in (name, "stale.txt"):
        (tmp_path / "checkpoint-1" / each).write_text("{}")
    save(world_of_one(), tmp_path)
    assert not (tmp_path / "checkpoint-1" / "stale.txt").exists()
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def begin(folder: Path, name: str = "checkpoint-1") -> Checkpoint:
    engine = sharded(models.tied_llama(), half=True)
    return Checkpoint.begin(engine, folder / name, plan_weights(engine), plan_state(engine, optimizer_of(engine)))


def test_a_folder_that_was_being_replaced_when_the_run_was_killed_gets_its_name_back(tmp_path):
    save(world_of_one(), tmp_path)
    before = content_of(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1").rename(tmp_path / "_replaced-checkpoint-1")
    save(world_of_one(), tmp_path, "checkpoint-2")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2"]
    assert content_of(tmp_path / "checkpoint-1") == before


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name", ["zero/optimizer.safetensors", "zero/master.safetensors", "model.safetensors"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_byte_that_changed_is_named_by_file_and_tensor(tmp_path, num_ranks, name):
    save(world_of_one(), tmp_path)
    path = tmp_path / "checkpoint-1" / name
    flip(path, 8 * (path.stat().st_size - 3))
    run_ranks(refuse_damaged, num_ranks, tmp_path / "checkpoint-1", os.path.basename(name))


def refuse_damaged(comm, folder, name):
    engine = sharded(models.tied_llama(), half=True)
    with pytest.raises(
        CheckpointError, match=rf"{name}: tensor '.*' has checksum \w+, but was saved with \w+, so the file"
    ):
        load_weights(engine, folder)
        load_state(engine, optimizer_of(engine), folder)


def save_in_background(comm, folder):
    snapshots, engine = Snapshots(), sharded(models.tied_llama(), half=True)
    optimizer = optimizer_of(engine)
    for step in (1, 2):
        checkpoint = save_checkpoint(engine, optimizer, folder / f"checkpoint-{step}", background=snapshots)
        fill(engine, lambda shard: shard.tensor + 1.0)  # training goes on
        checkpoint.wait()
        assert (folder / f"checkpoint-{step}").exists()
        held = sum(len(chunk) for chunk in snapshots._chunks)
        assert held == 64 * 2**20, "the second save uses the memory of the first"


@pytest.mark.quick
def test_a_save_in_the_background_holds_the_values_of_its_moment(tmp_path):
    run_ranks(save_in_background, 2, tmp_path)
    save(world_of_one(), tmp_path, "reference")
    for name in ("model.safetensors", "zero/optimizer.safetensors", "zero/master.safetensors"):
        assert (tmp_path / "checkpoint-1" / name).read_bytes() == (tmp_path / "reference" / name).read_bytes()
    first, second = (content_of(tmp_path / f"checkpoint-{step}") for step in (1, 2))
    assert first["model.safetensors"] != second["model.safetensors"]


def test_two_models_saved_in_the_background_with_one_snapshots_keep_their_values(tmp_path, monkeypatch):
    """Each model has connections of its own, so only the memory knows that the first save still reads it."""
    second_returned, write_range, waited = threading.Event(), OpenFiles.write_range, []

    def slow_write(opened, *args):
        if "policy" in threading.current_thread().name and not waited:
            waited.append(second_returned.wait(0.5))
        write_range(opened, *args)

    monkeypatch.setattr(OpenFiles, "write_range", slow_write)
    snapshots, saves = Snapshots(), []
    for name, offset in (("policy", 0.0), ("critic", 1.0)):
        engine = sharded(models.tied_llama(), half=True)
        fill(engine, lambda shard, offset=offset: shard.tensor + offset)
        saves.append(save_checkpoint(engine, None, tmp_path / name, background=snapshots))
    second_returned.set()
    for checkpoint in saves:
        checkpoint.wait()
    save(world_of_one(), tmp_path, "reference")
    policy, critic, reference = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("policy", "critic", "reference")
    )
    assert policy == reference
    assert critic != reference


def test_page_locked_memory_of_snapshots_is_used_as_torch_rounds_it(monkeypatch):
    """torch's allocator of page-locked memory gives powers of two."""
    taken, empty = [], torch.empty

    def locked(size, *, dtype, pin_memory):
        taken.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(staging.torch, "empty", locked)
    snapshots = Snapshots()
    places = [snapshots._place(numel * 2**20, torch.float32, pinned=True) for numel in (17, 14, 1, 20)]
    assert taken == [(128 * 2**20, True), (128 * 2**20, True)]
    assert len({place.untyped_storage().data_ptr() for place in places[:2]}) == 1, "the second fits behind the first"


@ranks(2)
def test_a_write_that_fails_in_the_background_is_an_error_on_every_rank(tmp_path):
    comm = world_of_one()
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(OpenFiles, "write_range", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        checkpoint = save(comm, tmp_path, background=Snapshots())
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.wait()
    assert threading.active_count() == 1 or "saving" not in str(threading.enumerate())
    comm.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_ranks_that_do_not_share_a_folder_are_refused(tmp_path):
    comm = world_of_one()
    own = tmp_path / f"host{comm.rank}"
    own.mkdir()
    with pytest.raises(CheckpointError, match="every rank needs access to the checkpoint folder"):
        save(comm, own)
    assert os.listdir(own) == []


def test_a_save_leaves_another_that_is_under_way_in_the_same_folder_alone(tmp_path):
    begun = begin(tmp_path, "slow")
    (tmp_path / "_saving-quick").mkdir()  # of a save that was killed
    save(world_of_one(), tmp_path, "quick")
    assert sorted(os.listdir(tmp_path)) == sorted(["quick", begun.path.parent.name])
    begun.finish()
    check_checkpoint(tmp_path / "slow")
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]


def wait_in_the_next_save(comm, folder):
    engine = sharded(models.tied_llama(), half=True)
    first = save_checkpoint(engine, optimizer_of(engine), folder / "first", background=Snapshots())
    save_pretrained(engine, folder / "second")
    assert (folder / "first").exists()
    first.wait()


def test_a_save_waits_for_the_one_in_the_background(tmp_path):
    run_ranks(wait_in_the_next_save, 2, tmp_path)
    check_checkpoint(tmp_path / "first")


@pytest.mark.quick
@ranks(2)
def test_the_oldest_goes_when_the_newest_is_complete(tmp_path):
    """Rank 0 cannot give the folder its name: what comes after a complete save does not run."""
    comm = world_of_one()
    save(comm, tmp_path, "checkpoint-1")
    removed = []
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(folders.os, "rename", lambda *paths: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        engine = sharded(models.tied_llama(), half=True)
        checkpoint = Checkpoint.begin(
            engine, tmp_path / "checkpoint-2", plan_weights(engine), plan_state(engine, optimizer_of(engine))
        )
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpoint.finish(after=lambda: removed.append(tmp_path))
    assert not removed
    check_checkpoint(tmp_path / "checkpoint-1")
