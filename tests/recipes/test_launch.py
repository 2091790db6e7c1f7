"""Starting processes, and getting their errors back as one."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hf_zero.errors import CheckpointError, CommError, DataError
from hf_zero.recipes.launch import WorkerError, error_of, launch
from tests.distributed import start_ranks
from tests.tiers import more


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """`launch` sets variables for its children; they are taken back after each test."""
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


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


def save_after_sigint(folder: str) -> None:
    """As training does: the first SIGINT is noted, and after it there is something to finish."""
    received = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    Path(folder, f"ready{os.environ['RANK']}").touch()
    while not received:
        time.sleep(0.01)
    time.sleep(0.5)
    Path(folder, f"saved{os.environ['RANK']}").write_text(str(len(received)), encoding="utf-8")
    raise SystemExit(128 + signal.SIGINT)


def ignore_sigint(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, f"ready{os.environ['RANK']}").touch()
    time.sleep(60)


def load(folder: str) -> None:
    Path(folder, f"ready{os.environ['RANK']}").touch()
    time.sleep(60)


def lose_the_rank_that_a_signal_ends(folder: str, error: type[Exception]) -> None:
    """Rank 0 trains already and takes notice; rank 1 has not begun."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    Path(folder, f"ready{dist.get_rank()}").touch()
    try:
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()
    except RuntimeError as lost:
        raise error("it does not answer") from lost


def write_environment_and_who_listens(folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    ports = [
        connection.laddr.ip
        for pid in (os.getpid(), os.getppid())
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    dist.barrier()
    environment = [os.environ[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")]
    text = f"{' '.join(environment)}\n{' '.join(ports)}"
    Path(folder, os.environ["RANK"]).write_text(text, encoding="utf-8")


def interrupt(folder: Path, times: int, number: int = signal.SIGINT) -> threading.Thread:
    """Sends a signal to this process, which launches, as soon as all that it has launched are ready."""

    def wait_and_send() -> None:
        deadline = time.monotonic() + 60
        while not all((folder / f"ready{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


def test_processes_meet_on_loopback_share_the_cores_and_nobody_outside_reaches_the_store_or_a_rank(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(6), raising=False)
    launch(2, write_environment_and_who_listens, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    lines = [path.read_text(encoding="utf-8").splitlines() for path in tmp_path.iterdir()]
    assert {line for line, _ in lines} == {"2 127.0.0.1 3"}
    listening = " ".join(line for _, line in lines).split()
    assert listening and {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@pytest.mark.quick
def test_the_rank_that_failed_is_heard_not_the_ones_that_lost_it(capfd):
    with pytest.raises(DataError, match="row 7: no text"):
        launch(2, fail_on_rank_1_while_rank_0_waits)
    assert capfd.readouterr().err == ""


def failure(rank: int, message: str | None = None, exitcode: int = 1) -> SimpleNamespace:
    """A record as torch makes it; without a message there is no error file."""
    found = "Signal" if message is None else {"message": message, "extraInfo": {"py_callstack": ""}}
    name = signal.Signals(-exitcode).name if exitcode < 0 else "<N/A>"
    return SimpleNamespace(
        message=found, exitcode=exitcode, timestamp=rank, error_file=os.devnull, signal_name=lambda: name
    )


LOST = "RuntimeError: connection closed by peer"
SILENT = "CommError: rank 1 does not answer"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([(0, LOST), (1, "DataError: row 7: no text")], "rank 1: row 7: no text"),
        # the agent may end the other one before it has written its error
        ([(1, "DataError: row 7: no text"), (0, None, -15)], "rank 1: row 7: no text"),
        ([(0, "DataError: no rows"), (1, "DataError: no rows")], "no rows"),
        ([(0, SILENT), (1, None, -9)], "rank 1 ended without a message: exit code -9 SIGKILL; the machine may be out"),
        ([(0, "CheckpointError: no room"), (1, None, -9)], "no room"),
        ([(0, None, -15), (1, None, 9)], "rank 1 ended without a message: exit code 9"),
    ],
)
def test_the_rank_that_failed_first_is_named(found, said):
    assert str(error_of({rank: failure(rank, *rest) for rank, *rest in found}, [])).startswith(said)


def test_a_process_that_was_killed_is_named_with_its_signal():
    with pytest.raises(WorkerError, match="rank 1 ended without a message: exit code -9 SIGKILL; .* out of memory"):
        launch(2, be_killed_on_rank_1)


@pytest.mark.full("slow")
def test_an_error_of_no_known_kind_keeps_its_traceback_once_and_a_signal_its_exit_code(capfd):
    with pytest.raises(WorkerError, match="rank [01] failed: KeyError: 'of no kind we know'"):
        launch(2, stumble)
    assert capfd.readouterr().err.count("Traceback") == 1
    with pytest.raises(SystemExit) as left:
        launch(2, leave_as_after_sigterm)
    assert left.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (ignore_sigint, 2),
        *more((save_after_sigint, 1), (load, 1)),
    ],
)
def test_ctrl_c_reaches_every_process_once_and_the_second_ends_all_of_them_now(tmp_path, function, times, capfd):
    before = signal.getsignal(signal.SIGINT)
    thread, began = interrupt(tmp_path, times), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(2, function, str(tmp_path))
    thread.join()
    assert time.monotonic() - began < 50
    assert "Traceback" not in capfd.readouterr().err
    if function is save_after_sigint:
        assert [(tmp_path / f"saved{rank}").read_text(encoding="utf-8") for rank in range(2)] == ["1", "1"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "raised"), [(CommError, SystemExit), (RuntimeError, SystemExit), (CheckpointError, CheckpointError)]
)
@pytest.mark.full("more cases", after=1)
def test_a_signal_that_ends_one_rank_is_the_end_of_the_run_and_not_that_others_lost_it(tmp_path, error, raised):
    thread = interrupt(tmp_path, 1, signal.SIGTERM)
    with pytest.raises(raised) as ended:
        launch(2, lose_the_rank_that_a_signal_ends, str(tmp_path), error)
    thread.join()
    if raised is SystemExit:
        assert ended.value.code == 128 + signal.SIGTERM


def launch_two(folder: str) -> None:
    tempfile.tempdir = folder
    launch(2, ignore_sigint, folder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("when", ["first moment", "imports", "training"])
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path, when):
    (process,) = start_ranks(launch_two, 1, str(tmp_path))
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while len(ranks) < 2 or (when == "training" and len(list(tmp_path.glob("ready*"))) < 2):
            assert process.exitcode is None and time.monotonic() < deadline
            ranks = psutil.Process(process.pid).children()
            time.sleep(0.001)
        if when == "imports":
            time.sleep(0.5)
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.join()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
