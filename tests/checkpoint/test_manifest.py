"""The manifest: every change of the files that it lists is noticed, and of itself; other files may change."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_zero.checkpoint import check_checkpoint, save_checkpoint, save_pretrained
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest, check_checksums, sealed
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.subjects import flip, optimizer_of, resealed, sharded
from tests.tiers import more


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    engine = sharded(models.tied_llama())
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-1"
    save_checkpoint(engine, optimizer_of(engine), folder, step=1)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / saved.name)


@pytest.mark.parametrize("stride", [7, *more(1)])
def test_every_bit_of_the_manifest_counts(saved, folder, stride):
    nbytes = (folder / MANIFEST_NAME).stat().st_size
    for byte in range(0, nbytes, stride):
        flip(folder / MANIFEST_NAME, 8 * byte + byte % 8)
        with pytest.raises(CheckpointError, match="has changed since it was written, so the files cannot be verified"):
            Manifest.read(folder)
        shutil.copy(saved / MANIFEST_NAME, folder)


def test_a_model_card_may_change_and_files_may_be_added(folder):
    for name in ("README.md", "notes.txt", ".gitattributes", "events.out.tfevents"):
        (folder / name).write_text("mine")
    check_checkpoint(folder)
    resealed(folder)
    (folder / "README.md").write_text("changed")
    (folder / ".gitattributes").unlink()
    assert check_checksums(folder).files == Manifest.read(folder).files


def test_a_folder_that_was_pushed_without_the_runs_state_is_whole_but_not_with_a_part_of_it(folder):
    (folder / "scheduler.pt").write_bytes(b"schedule")
    resealed(folder)
    (folder / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="scheduler.pt: is missing"):
        check_checksums(folder)
    shutil.rmtree(folder / "zero")
    found = check_checksums(folder)
    assert found.tensors and set(Manifest.read(folder).files) - set(found.files) == {
        "scheduler.pt",
        "zero/optimizer.safetensors",
    }
    with pytest.raises(CheckpointError, match="missing"):
        check_checkpoint(folder)  # to go on from, it is incomplete


def test_a_model_saved_alone_has_checksums_and_saving_into_it_again_keeps_them_true(tmp_path):
    engine = sharded(models.tied_llama())
    save_pretrained(engine, tmp_path)
    first = check_checksums(tmp_path)
    assert first.tensors and {"config.json", "model.safetensors"} <= set(Manifest.read(tmp_path).files)
    save_checkpoint(engine, optimizer_of(engine), tmp_path)
    assert len(check_checksums(tmp_path).tensors) > len(first.tensors)
    (tmp_path / "mine.txt").write_text("mine")
    save_pretrained(engine, tmp_path, max_shard_size="2KB")
    names = set(Manifest.read(tmp_path).files)
    assert "model.safetensors.index.json" in names and not {"model.safetensors", "zero/optimizer.safetensors"} & names
    assert not (tmp_path / "zero").exists() and Manifest.read(tmp_path).run is None
    assert "mine.txt" not in names
    assert set(check_checksums(tmp_path).files) == names


def test_a_save_that_is_killed_among_its_files_leaves_no_table_that_is_wrong(tmp_path, monkeypatch):
    engine = sharded(models.tied_llama())
    save_pretrained(engine, tmp_path)
    replace = os.replace

    def killed(source, target):
        if Path(target).name == "model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(engine, tmp_path)
    assert Manifest.read(tmp_path) is None


def test_wrong_types_are_one_line(folder):
    content = json.loads((folder / MANIFEST_NAME).read_text())
    for files in (
        [],
        {"a": 3},
        {"a": {"nbytes": 1, "crc32": None}},
        {"a": {"nbytes": 1, "header_crc32": 2, "tensors": {"b": None}}},
    ):
        body = json.dumps({**content, "files": files}, indent=1).removesuffix("\n}").encode()
        (folder / MANIFEST_NAME).write_bytes(sealed(body))
        with pytest.raises(CheckpointError, match="cannot be parsed") as error:
            Manifest.read(folder)
        assert "\n" not in str(error.value)
    (folder / MANIFEST_NAME).write_bytes(sealed(b'{"a":' + b"[" * 200_000))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(folder)


def test_weights_in_parts_without_their_index_are_incomplete(tmp_path):
    save_pretrained(sharded(models.tied_llama()), tmp_path, max_shard_size="2KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        check_checkpoint(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="found neither model.safetensors nor model.safetensors.index.json"):
        check_checkpoint(tmp_path)


def test_a_config_that_is_broken_is_noticed_where_there_are_no_checksums(tmp_path):
    save_pretrained(sharded(models.tied_llama()), tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        check_checkpoint(tmp_path)
