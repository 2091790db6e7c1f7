"""The table of checksums: every change of what it lists is noticed, and of the table itself; the rest is free."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_zero.checkpoint import check_checkpoint, save_checkpoint, save_pretrained, save_state
from hf_zero.checkpoint.manifest import check_checksums
from hf_zero.checkpoint.table import TABLE_NAME, ChecksumTable
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.fakes import FakeEngine, FakeOptimizer, world_of_one
from tests.tiers import more


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    engine = FakeEngine(models.tied_llama(), world_of_one())
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-1"
    save_checkpoint(engine, FakeOptimizer(engine), folder, step=1)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / saved.name)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_any_bit_of_any_file_is_noticed(saved, folder):
    for path in files_in(folder):
        name, nbytes = path.relative_to(folder), path.stat().st_size
        for byte in sorted({0, 1, 8, 9, nbytes // 3, nbytes // 2, nbytes - 2, nbytes - 1}):
            flip(path, 8 * byte + byte % 8)
            with pytest.raises(CheckpointError) as error:
                check_checkpoint(folder)
                check_checksums(folder)
            assert path.name in str(error.value) and "\n" not in str(error.value), f"{name}: byte {byte}"
            shutil.copy(saved / name, path)
    check_checkpoint(folder)


@pytest.mark.parametrize("stride", [7, *more(1)])
def test_every_bit_of_the_table_counts(saved, folder, stride):
    nbytes = (folder / TABLE_NAME).stat().st_size
    for byte in range(0, nbytes, stride):
        flip(folder / TABLE_NAME, 8 * byte + byte % 8)
        with pytest.raises(CheckpointError, match="has changed since it was written, so nothing can be compared"):
            ChecksumTable.read(folder)
        shutil.copy(saved / TABLE_NAME, folder)


def test_any_file_that_lacks_or_is_anothers_is_noticed(saved, folder):
    names = [str(path.relative_to(folder)) for path in files_in(folder)]
    for name in names:
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match="missing|changed since"):
            check_checksums(folder)
        shutil.copy(saved / name, folder / name)
    for one, other in zip(names, names[1:]):
        shutil.copy(saved / other, folder / one)
        with pytest.raises(CheckpointError):
            check_checksums(folder)
        shutil.copy(saved / one, folder / one)
    check_checkpoint(folder)


def test_a_model_card_may_change_and_files_may_be_added(folder):
    for name in ("README.md", "notes.txt", ".gitattributes", "events.out.tfevents"):
        (folder / name).write_text("mine")
    check_checkpoint(folder)
    ChecksumTable.of_folder(folder, {}).write(folder)
    (folder / "README.md").write_text("changed")
    (folder / ".gitattributes").unlink()
    assert check_checksums(folder).num_files == len(ChecksumTable.read(folder).files)


def test_a_folder_that_was_pushed_without_the_runs_state_is_whole_but_not_with_a_part_of_it(folder):
    (folder / "zero" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest.json: is missing"):
        check_checksums(folder)
    shutil.rmtree(folder / "zero")
    found = check_checksums(folder)
    assert set(found.left_out) == {"zero/manifest.json", "zero/optimizer.safetensors"} and found.num_tensors > 0
    with pytest.raises(CheckpointError, match="missing"):
        check_checkpoint(folder)  # to go on from, it is incomplete


def test_a_model_saved_alone_has_checksums_and_saving_into_it_again_keeps_them_true(tmp_path):
    engine = FakeEngine(models.tied_llama(), world_of_one())
    save_pretrained(engine, tmp_path)
    first = check_checksums(tmp_path)
    assert first.num_tensors > 0 and {"config.json", "model.safetensors"} <= set(ChecksumTable.read(tmp_path).files)
    save_state(engine, FakeOptimizer(engine), tmp_path)
    assert check_checksums(tmp_path).num_tensors > first.num_tensors
    (tmp_path / "mine.txt").write_text("mine")
    save_pretrained(engine, tmp_path, max_shard_size="2KB")
    names = set(ChecksumTable.read(tmp_path).files)
    assert "model.safetensors.index.json" in names and not {"model.safetensors", "zero/manifest.json"} & names
    assert "mine.txt" not in names
    assert check_checksums(tmp_path).left_out == ()


def test_a_save_that_is_killed_among_its_files_leaves_no_table_that_is_wrong(tmp_path, monkeypatch):
    engine = FakeEngine(models.tied_llama(), world_of_one())
    save_pretrained(engine, tmp_path)
    replace = os.replace

    def killed(source, target):
        if Path(target).name == "model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(engine, tmp_path)
    assert ChecksumTable.read(tmp_path) is None


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\0b", "", "zero/../../x", "\ud800"])
def test_names_that_lead_elsewhere_are_refused(folder, name):
    table = ChecksumTable.read(folder)
    ChecksumTable({**table.files, name: table.files["config.json"]}).write(folder)
    with pytest.raises(CheckpointError, match="lists files that are not in its folder"):
        ChecksumTable.read(folder)


def test_a_table_of_wrong_types_or_deeply_nested_is_one_line(folder, monkeypatch):
    from hf_zero.checkpoint import table as room

    for content in (
        {"format": 1, "files": []},
        {"format": 1, "files": {"a": 3}},
        {"format": 1, "files": {"a": {"nbytes": 1, "crc32": "2"}}},
        {"format": 1, "files": {"a": {"nbytes": 1, "header_crc32": 2, "tensors": {"b": None}}}},
        {"format": 7, "files": {}},
    ):
        body = json.dumps(content, indent=1).removesuffix("\n}").encode()
        (folder / TABLE_NAME).write_bytes(room._sealed(body))
        with pytest.raises(CheckpointError) as error:
            ChecksumTable.read(folder)
        assert "\n" not in str(error.value)
    (folder / TABLE_NAME).write_bytes(room._sealed(b'{"a":' + b"[" * 200_000))
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChecksumTable.read(folder)


def test_weights_in_parts_without_their_index_are_incomplete(tmp_path):
    save_pretrained(FakeEngine(models.tied_llama(), world_of_one()), tmp_path, max_shard_size="2KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        check_checkpoint(tmp_path)
    (tmp_path / TABLE_NAME).unlink()
    with pytest.raises(CheckpointError, match="no model.safetensors.index.json, which says what lies in such files"):
        check_checkpoint(tmp_path)


def test_a_config_that_is_broken_is_noticed_where_there_are_no_checksums(tmp_path):
    save_pretrained(FakeEngine(models.tied_llama(), world_of_one()), tmp_path)
    (tmp_path / TABLE_NAME).unlink()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        check_checkpoint(tmp_path)
