"""Runs a test's function on several real gloo ranks of this machine.

Importing torch and transformers takes longer than most tests. So one process, the template, imports them and runs
nothing; ranks are forked from it, and kept from test to test. Ranks that fail or hang are killed, all of a group, and
so are those that have collected threads: each of gloo's groups has some that wake a hundred times a second, and what
refers to a group may lie in a cycle. The next test gets new ones.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NoReturn


_POOLS: dict[int, "_Pool"] = {}
_KEY = b"hf-zero-tests"
# With more threads than this in a rank, the group is not used again.
_MAX_THREADS = 64


def run_ranks(fn, num_ranks: int, *args, timeout: float = 120.0) -> list:
    """Calls `fn(*args)` on every rank of a process group, and returns the results in rank order.

    Args:
        fn: a module-level function of a test module; arguments and result must pickle. It finds the process group
            initialised (also with one rank), a seeded generator, and `direct.MIN_NUMEL` as it is here.
        num_ranks (`int`): how many processes.
        timeout (`float`): seconds, after which all of them are killed and the test fails.

    Raises:
        `RemoteError`: with the traceback of the first rank that failed.
    """
    pool = _POOLS.get(num_ranks)
    if pool is None:
        pool = _POOLS[num_ranks] = _Pool(num_ranks)
    try:
        return pool.call(fn, args, timeout)
    except BaseException:
        pool.is_worn = True
        raise
    finally:
        if pool.is_worn:
            pool.kill()
            del _POOLS[num_ranks]


def forget_ranks() -> None:
    """Ends all ranks that are kept: the next test takes new ones, which have made no group but the world."""
    while _POOLS:
        _POOLS.popitem()[1].kill()


class RemoteError(AssertionError):
    """A rank failed; the message is its traceback. `kind` is the name of the exception's class."""

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(f"rank {rank}: {text}")
        self.kind = kind


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Pool:
    """Ranks of one process group. `is_worn` once they should not be used again."""

    def __init__(self, num_ranks: int):
        port = free_port()
        self.is_worn = False
        self.pids, self.connections = [], []
        for rank in range(num_ranks):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            pid, connection = _template().fork(env)
            self.pids.append(pid)
            self.connections.append(connection)

    def call(self, fn, args, timeout: float) -> list:
        from hf_zero.engine import direct

        job = pickle.dumps((fn.__module__, fn.__qualname__, args, direct.MIN_NUMEL))
        for connection in self.connections:
            connection.send_bytes(job)
        results, failures = [], []
        for rank, connection in enumerate(self.connections):
            # a rank that waits for one that failed would wait long: give it little time after the first failure
            limit = 5.0 if failures else timeout
            try:
                ready = connection.poll(limit)
                answer = (
                    pickle.loads(connection.recv_bytes())
                    if ready
                    else ("failed", "Timeout", f"no answer within {limit:.0f} s\n{_stacks(self.pids[rank])}")
                )
            except EOFError:
                answer = ("failed", "Died", "the process ended")
            if answer[0] == "failed":
                failures.append((rank, *answer[1:]))
            else:
                results.append(answer[1])
                self.is_worn |= answer[2] > _MAX_THREADS
        if failures:
            # the reason first, then those who waited for it in vain
            waited = {"CommError": 1, "Timeout": 2}
            failures.sort(key=lambda failure: waited.get(failure[1], 0))
            raise RemoteError(*failures[0])
        return results

    def kill(self) -> None:
        for pid, connection in zip(self.pids, self.connections, strict=True):
            connection.close()
            _template().kill(pid)


def _stacks_file(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"hf-zero-tests-{pid}.stacks")


def _stacks(pid: int) -> str:
    """Where each thread of a rank that does not answer is."""
    os.kill(pid, signal.SIGUSR2)
    time.sleep(1.0)
    return _stacks_file(pid).read_text()


class _Template:
    """The process that ranks are forked from."""

    def __init__(self):
        self._listener = Listener(("127.0.0.1", 0), authkey=_KEY)
        root = str(Path(__file__).parents[1])
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.distributed", str(self._listener.address[1])]
        self._process = subprocess.Popen(command, env=env, start_new_session=True)
        self._connection = self._listener.accept()

    def fork(self, env: dict[str, str]) -> tuple[int, Connection]:
        """A new rank with these environment variables: its process id, and the connection to it."""
        self._connection.send(("fork", env))
        pid = self._connection.recv()
        return pid, self._listener.accept()

    def kill(self, pid: int) -> None:
        """Kills a rank with all that it started, and waits for its end."""
        self._connection.send(("kill", pid))
        self._connection.recv()

    def end(self) -> None:
        self._connection.close()
        self._process.wait()


@cache
def _template() -> _Template:
    template = _Template()
    atexit.register(template.end)
    return template


def _be_template(port: int) -> None:
    """Imports what most tests need, then forks and ends ranks as it is told, until nobody is there to tell it."""
    import torch
    import torch._dynamo
    import transformers.trainer  # noqa: F401

    import hf_zero.engine.direct  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    connection = Client(("127.0.0.1", port), authkey=_KEY)
    pids: set[int] = set()
    while True:
        try:
            order, what = connection.recv()
        except EOFError:
            break
        if order == "kill":
            pids.remove(what)
            _kill(what)
            connection.send(what)
        elif pid := os.fork():
            pids.add(pid)
            connection.send(pid)
        else:
            connection.close()
            _be_rank(port, what)
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _stacks_file(pid).unlink(missing_ok=True)


def _be_rank(port: int, env: dict[str, str]) -> NoReturn:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    try:
        _serve(port)
    except BaseException:  # noqa: B902 - nothing of the template's may run in the rank
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(port: int) -> None:
    """Runs what it is told, and answers with the result or the error, and with the number of its threads."""
    import psutil
    import torch
    import torch.distributed as dist

    from hf_zero.engine import direct

    stacks = open(_stacks_file(os.getpid()), "w")  # noqa: SIM115 - as long as the process lives
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    connection = Client(("127.0.0.1", port), authkey=_KEY)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    this = psutil.Process()
    while True:
        try:
            module, name, args, direct.MIN_NUMEL = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(1234)
            fn = getattr(importlib.import_module(module), name)
            answer = ("done", fn(*args), this.num_threads())
        except BaseException as error:  # noqa: B902 - everything goes to the test, which decides
            answer = ("failed", type(error).__name__, "".join(traceback.format_exception(error)))
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _be_template(int(sys.argv[1]))
