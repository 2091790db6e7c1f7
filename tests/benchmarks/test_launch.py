"""Groups of ranks: results in order, failures reported, nothing left running; and the counter of bytes sent."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.launch import run_group
from tests.distributed import RemoteError, run_ranks


TASKS = "tests.benchmarks.tasks"
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
@pytest.mark.full("slow")
def test_wire_counter_sees_what_a_rank_sends():
    nbytes = 8 * 2**20
    sent = run_group(f"{TASKS}:send_known_bytes", {"nbytes": nbytes}, num_processes=2, timeout=120)
    # gloo's headers and two barriers stay far below 1 %.
    assert nbytes <= sent[0] <= 1.01 * nbytes
    assert sent[1] <= 0.01 * nbytes


@pytest.mark.quick
@pytest.mark.timeout(180)
def test_a_rank_that_raises_ends_the_group_with_its_traceback():
    before = set(multiprocessing.active_children())  # ranks that other tests keep
    run_group(f"{TASKS}:sleep", {"seconds": 0}, num_processes=2, timeout=120)  # takes as long as imports do
    start = time.monotonic()
    with pytest.raises(RemoteError, match="rank 1: (.|\n)*ValueError: the reason"):
        run_group(f"{TASKS}:raise_on_last_rank", {}, num_processes=2, timeout=120)
    assert time.monotonic() - start < 60
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.full("slow")
@pytest.mark.timeout(180)
def test_a_group_that_does_not_answer_is_ended():
    before = set(multiprocessing.active_children())
    with pytest.raises(RemoteError, match="no answer within 3 s"):
        run_group(f"{TASKS}:sleep", {"seconds": 300}, num_processes=2, timeout=3)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.timeout(180)
def test_ranks_that_ended_between_two_tests_are_replaced_if_they_were_killed_and_told_if_they_failed():
    before = run_ranks(os.getpid, 2)
    _end(before[1], signal.SIGKILL)
    after = run_ranks(os.getpid, 2)
    assert set(before).isdisjoint(after)
    _end(after[1], signal.SIGABRT)
    with pytest.raises(RemoteError, match="the process ended with exit code -6"):
        run_ranks(os.getpid, 2)


def _end(process: int, number: int) -> None:
    ended = psutil.Process(process)
    ended.send_signal(number)
    assert not psutil.wait_procs([ended], timeout=30)[1]


@pytest.mark.timeout(180)
def test_ranks_end_with_the_process_that_started_them():
    """Whatever ends it: a rank holds on to the fork server, and that to its ranks."""
    lines = (
        "import time",
        "from multiprocessing import forkserver",
        "from tests import distributed",
        "forkserver.set_forkserver_preload = lambda names: None",  # which takes long
        "distributed.start_ranks(time.sleep, 2, 300)[0].join()",
    )
    starter = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=ROOT)
    ranks: list[psutil.Process] = []
    try:
        while len(ranks) < 2:  # children of the fork server
            time.sleep(0.05)
            started = psutil.Process(starter.pid).children(recursive=True)
            ranks = [each for each in started if each.ppid() != starter.pid]
        starter.terminate()
        starter.wait(30)
        assert not psutil.wait_procs(ranks, timeout=30)[1]
    finally:
        for process in (starter, *ranks):
            with suppress(psutil.NoSuchProcess):
                process.kill()
