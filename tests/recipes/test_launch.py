"""Starting processes, and getting their errors back as one."""

import os
import signal
from pathlib import Path

import pytest

from hf_zero.errors import DataError
from hf_zero.recipes.launch import WorkerError, launch


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """`launch` sets variables for its children; they are taken back after each test."""
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def write_environment(folder: str) -> None:
    names = ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    Path(folder, os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names), encoding="utf-8")


def fail_on_rank_1_while_rank_0_waits() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise DataError("row 7: no text;\nfill it in")
    dist.barrier()


def stumble() -> None:
    raise KeyError("of no kind we know")


def be_killed_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def leave_as_after_sigterm() -> None:
    raise SystemExit(128 + signal.SIGTERM)


def test_processes_meet_on_loopback_and_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(6), raising=False)
    launch(2, write_environment, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert {path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {"2 127.0.0.1 3"}


def test_the_rank_that_failed_is_heard_not_the_ones_that_lost_it(capfd):
    with pytest.raises(DataError, match="row 7: no text"):
        launch(2, fail_on_rank_1_while_rank_0_waits)
    assert capfd.readouterr().err == ""


def test_an_error_of_no_known_kind_keeps_its_traceback_once(capfd):
    with pytest.raises(WorkerError, match="rank [01] failed: KeyError: 'of no kind we know'"):
        launch(2, stumble)
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_process_that_was_killed_is_named_with_its_signal():
    with pytest.raises(WorkerError, match="rank 1 ended without a word: exit code -9 SIGKILL; .* out of memory"):
        launch(2, be_killed_on_rank_1)


def test_processes_that_a_signal_has_stopped_end_the_run_with_their_exit_code(capfd):
    with pytest.raises(SystemExit) as left:
        launch(2, leave_as_after_sigterm)
    assert left.value.code == 128 + signal.SIGTERM
