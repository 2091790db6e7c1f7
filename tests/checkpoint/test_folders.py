"""How folders get and lose their names."""

import errno
import os

import pytest

from hf_zero.checkpoint import folders


pytestmark = pytest.mark.quick


def tree(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_that_was_being_replaced_gets_its_name_back(tmp_path):
    (tmp_path / "_replaced-checkpoint-1").mkdir()
    folders.recover(tmp_path)
    assert tree(tmp_path) == ["checkpoint-1"]


def test_a_kill_while_a_folder_is_removed_leaves_nothing_under_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "model.safetensors").touch()

    def killed(path, **_):
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folders.remove_folder(folder)
    assert tree(tmp_path) == ["_removing-checkpoint-1", "_removing-checkpoint-1/model.safetensors"]
    folders.recover(tmp_path)
    assert tree(tmp_path) == []


def test_a_folder_loses_its_name_on_disk_before_its_files_go(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    seen = []
    monkeypatch.setattr(folders, "sync_path", lambda path: seen.append((path, tree(path))))
    folders.remove_folder(tmp_path / "checkpoint-1")
    assert seen == [(tmp_path, ["_removing-checkpoint-1"])]
    assert tree(tmp_path) == []


def test_a_folder_that_cannot_be_removed_is_said_and_ends_nothing(tmp_path, caplog):
    folders.remove_folder(tmp_path / "checkpoint-1")
    assert "checkpoint-1: cannot be removed (No such file or directory)" in caplog.text


def test_what_was_to_be_replaced_gets_its_name_back_when_the_new_one_cannot_have_it(tmp_path, monkeypatch):
    old, new, calls, rename = tmp_path / "final", tmp_path / "staged", [], os.rename
    for folder in (old, new):
        folder.mkdir()
        (folder / folder.name).touch()

    def second_fails(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "rename", second_fails)
        with pytest.raises(OSError, match="Input/output error"):
            folders.commit(new, old)
    assert tree(tmp_path) == ["final", "final/final", "staged", "staged/staged"]
    folders.commit(new, old)
    assert tree(tmp_path) == ["final", "final/staged"]


def test_a_folder_that_was_replaced_is_removed(tmp_path):
    for name in ("checkpoint-1", "_replaced-checkpoint-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    folders.recover(tmp_path)
    assert tree(tmp_path) == ["checkpoint-1", "checkpoint-1/model.safetensors"]
    assert (tmp_path / "checkpoint-1" / "model.safetensors").read_text() == "checkpoint-1"


def test_everything_is_on_disk_before_the_name_and_the_name_before_the_former_folder_goes(tmp_path, monkeypatch):
    for name in ("final", "staged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    seen, rename, sync = [], os.rename, folders.sync_path
    monkeypatch.setattr(folders, "sync_path", lambda path: (seen.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(folders.os, "rename", lambda *paths: (seen.append(f"{paths[1].name}"), rename(*paths)))
    folders.commit(tmp_path / "staged", tmp_path / "final")
    parent = f"sync {tmp_path.name}"
    expected = ["sync file", "sync staged", "_replaced-final", "final", parent, "_removing-_replaced-final", parent]
    assert seen == expected


def test_the_names_of_new_folders_are_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folders, "sync_path", synced.append)
    folders.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_file_is_replaced_whole_and_once_it_is_on_disk_or_stays(tmp_path, monkeypatch):
    path, synced, replace = tmp_path / "report.html", [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", lambda new, old: (synced.append("its name"), replace(new, old)))
    folders.write_whole(path, b"old")
    assert synced == [str(tmp_path / "_report.html.new"), "its name", str(tmp_path)]

    def fails(new, old):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="gone"):
        folders.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
