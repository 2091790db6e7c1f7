"""Copies between host and device, and the thread for what has arrived."""

import gc
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_zero.comm import Bus, Counters
from hf_zero.comm.bus import _NOT_OURS, MAX_CHECKS, LateChecks
from hf_zero.errors import ConfigError


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="not Linux")
def test_host_memory_is_private_in_huge_pages_and_no_forked_process_has_it():
    memory = Bus(torch.device("cpu"), Counters()).empty(2**21, torch.float32)
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        begin, end, shared = re.match(r"(\w+)-(\w+) ...(.)", mapping).groups()
        if int(begin, 16) <= memory.data_ptr() < int(end, 16):
            break
    assert shared == "p"
    flags = re.search(r"^VmFlags:(.*)", mapping, re.MULTILINE)
    assert flags is None or {"dc", "hg"} <= set(flags[1].split()), mapping


def test_page_locked_memory_is_unlocked_when_it_goes_and_a_refusal_says_whose_memory(monkeypatch):
    """With what CUDA's driver would answer: the device is another, the memory is the host's."""
    locked = {}

    class Driver:
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            assert not flags
            locked[address] = nbytes
            return nbytes > 2000

        def cudaHostUnregister(self, address):  # noqa: N802
            del locked[address]

    class Backend:
        cudart = Driver

        @staticmethod
        def check_error(code):
            if code:
                raise RuntimeError("out of memory")

    bus = Bus(torch.device("cpu"), Counters())
    bus.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    memory = bus.empty(100, torch.float32)
    assert locked == {memory.data_ptr(): 400}
    assert bus.empty(100, torch.float32, locked=False).data_ptr() not in locked
    with pytest.raises(ConfigError, match="cannot page-lock another 4.0 KiB of host memory, with 400 bytes in use"):
        bus.empty(1024, torch.float32)
    forked, own = bus.empty(100, torch.float32), os.getpid()
    places = memory.data_ptr(), forked.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: own + 1)
        del forked
        gc.collect()
    del memory
    gc.collect()
    assert [place in locked for place in places] == [False, True], "a process that was forked asked the driver"
    assert bus.host_nbytes == 0


def test_a_forked_process_does_not_unmap_the_memory(monkeypatch):
    memory = Bus(torch.device("cpu"), Counters()).empty(100, torch.float32)
    before, own = len(_NOT_OURS), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: own + 1)
        del memory
        gc.collect()
    assert len(_NOT_OURS) == before + 1
    _NOT_OURS.pop()


def test_late_checks_need_no_memory_that_the_driver_registers(monkeypatch):
    """Many sandboxes refuse that, and every run in bf16 has late checks."""
    bus = Bus(torch.device("cpu"), Counters())
    bus.device = torch.device("cuda", 0)
    asked, empty = [], torch.empty
    monkeypatch.setattr(bus, "_lock", lambda address, nbytes: pytest.fail(f"{nbytes} bytes were registered"))
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **kw: asked.append(pin_memory) or empty(*size, **kw)
    )
    checks, refused = LateChecks(bus, reads_at_once=False), []
    for holds in [True] * 3 * MAX_CHECKS + [False] + [True] * MAX_CHECKS:
        checks.expect(torch.tensor(holds), lambda: refused.append(True))
    assert checks.has_failed()
    checks.settle()
    assert refused == [True] and set(asked) == {True} and len(asked) == 5
    for _ in range(3 * MAX_CHECKS):
        checks.expect(torch.tensor(True), lambda: refused.append(True))
        assert not checks.has_failed()
    assert len(asked) == 5 and bus.host_nbytes == 0


def test_jobs_run_in_order_without_gradients_and_a_failure_stops_those_behind_it():
    bus = Bus(torch.device("cpu"), Counters())
    done = []
    for number in range(3):
        bus.later(lambda number=number: done.append((number, torch.is_grad_enabled())))
    bus.wait_for_jobs()
    assert done == [(0, False), (1, False), (2, False)]

    def fail():
        raise ValueError("no room")

    bus.later(fail)
    behind = bus.later(lambda: done.append("never"))
    with pytest.raises(ValueError, match="no room"):
        behind.wait()
    with pytest.raises(ValueError, match="no room"):
        bus.wait_for_jobs()
    assert "never" not in done
    bus.later(lambda: done.append("again"))
    bus.wait_for_jobs()
    assert done[-1] == "again"


@pytest.mark.parametrize("users, wanted", [({}, 3), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_an_update_on_the_host_runs_on_the_ranks_share_of_the_cores_under_torchrun(users, wanted):
    launcher = (
        "import os, subprocess, sys; os.environ.setdefault('OMP_NUM_THREADS', '1');"
        "os.environ |= {'TORCHELASTIC_RUN_ID': 'none', 'LOCAL_WORLD_SIZE': '2'};"
        "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    )
    program = (
        "import os, torch; os.sched_getaffinity = lambda _: range(7); from hf_zero.comm import Bus, Counters;"
        "bus, found = Bus(torch.device('cpu'), Counters()), []; own = torch.get_num_threads();"
        "bus.later(lambda: found.append(torch.get_num_threads()), lane='update').wait();"
        "print(found[0], torch.get_num_threads() - own)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | users
    command = [sys.executable, "-c", launcher, program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(wanted), "0"], done.stderr
