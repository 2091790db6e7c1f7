"""How folders get and lose their names, and what may be removed."""

import errno
import fcntl
import os
import time

import pytest

from hf_zero.checkpoint import folders


pytestmark = pytest.mark.quick


def tree(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def begun(folder):
    """A save that is under way: its temporary folder, and the descriptor that marks it as in use."""
    staged = folder / "_saving-live"
    descriptor = folders.make_staged(staged)
    (staged / "model.safetensors").write_bytes(b"half")
    return staged, descriptor


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EBADF])
def no_locks(request, monkeypatch):
    """A file system without locks."""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_save_under_way_stays_and_one_whose_process_ended_goes(tmp_path):
    staged, descriptor = begun(tmp_path)
    folders.remove_left_over(tmp_path)
    assert (staged / "model.safetensors").exists()
    os.close(descriptor)
    folders.remove_left_over(tmp_path)
    assert not staged.exists()


def test_a_save_under_way_stays_where_locks_do_not_work(tmp_path, no_locks):
    staged, _ = begun(tmp_path)
    folders.remove_left_over(tmp_path)
    assert (staged / "model.safetensors").exists()
    for path in (staged, *staged.iterdir()):
        os.utime(path, times=(time.time() - folders.ABANDONED_SECONDS - 60,) * 2)
    folders.remove_left_over(tmp_path)
    assert not staged.exists(), "nothing in it has changed for a day"


def test_a_folder_that_has_no_lock_yet_stays(tmp_path):
    (tmp_path / "_saving-new").mkdir()
    folders.remove_left_over(tmp_path)
    assert (tmp_path / "_saving-new").exists()


def test_a_folder_that_was_being_replaced_gets_its_name_back_where_locks_do_not_work(tmp_path, no_locks):
    (tmp_path / "_replaced-checkpoint-1").mkdir()
    folders.remove_left_over(tmp_path)
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
    folders.remove_left_over(tmp_path)
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
            folders.take_name(new, old)
    assert tree(tmp_path) == ["final", "final/final", "staged", "staged/staged"]
    folders.take_name(new, old)
    folders.remove_replaced(old)
    assert tree(tmp_path) == ["final", "final/staged"]


def test_a_state_that_was_replaced_is_removed(tmp_path):
    for name in ("zero", "_replaced-zero"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    folders.remove_replaced(tmp_path / "zero")
    assert tree(tmp_path) == ["zero", "zero/manifest.json"]


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
