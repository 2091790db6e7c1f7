"""Runs a test's function on several real gloo ranks of this machine.

Workers are kept from test to test, since importing torch and transformers takes longer than most tests. A worker that
fails or hangs is killed with its whole group, and the next test gets new ones.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path


_POOLS: dict[int, "_Pool"] = {}
_KEY = b"hf-zero-tests"


def run_ranks(fn, num_ranks: int, *args, timeout: float = 120.0) -> list:
    """Calls `fn(*args)` on every rank of a process group, and returns the results in rank order.

    Args:
        fn: a module-level function of a test module; arguments and result must pickle. It finds the process group
            initialised (also with one rank) and a seeded generator.
        num_ranks (`int`): how many processes.
        timeout (`float`): seconds, after which all of them are killed and the test fails.

    Raises:
        `RemoteError`: with the traceback of the first rank that failed.
    """
    pool = _POOLS.get(num_ranks)
    if pool is None or not pool.is_alive():
        pool = _POOLS[num_ranks] = _Pool(num_ranks)
    try:
        return pool.call(fn, args, timeout)
    except BaseException:
        pool.kill()
        del _POOLS[num_ranks]
        raise


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
    def __init__(self, num_ranks: int):
        listener = Listener(("127.0.0.1", 0), authkey=_KEY)
        port = free_port()
        self.processes, self.connections = [], [None] * num_ranks
        for rank in range(num_ranks):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "HF_ZERO_TEST_PORT": str(listener.address[1]),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, "-m", "tests.distributed"]
            self.processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        for _ in range(num_ranks):
            connection = listener.accept()
            self.connections[connection.recv()] = connection
        listener.close()

    def is_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def call(self, fn, args, timeout: float) -> list:
        job = pickle.dumps((fn.__module__, fn.__qualname__, args))
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
                    else ("failed", "Timeout", f"no answer within {limit:.0f} s")
                )
            except EOFError:
                answer = ("failed", "Died", "the process ended")
            if answer[0] == "failed":
                failures.append((rank, *answer[1:]))
            else:
                results.append(answer[1])
        if failures:
            failures.sort(key=lambda failure: failure[1] in ("Timeout", "CommError"))
            raise RemoteError(*failures[0])
        return results

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@atexit.register
def _kill_all() -> None:
    for pool in _POOLS.values():
        pool.kill()


def _serve() -> None:
    import importlib

    import torch
    import torch.distributed as dist

    from hf_zero.engine import direct

    torch.set_num_threads(1)
    direct.MIN_NUMEL = 0  # the models of the tests are small
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connection = Client(("127.0.0.1", int(os.environ["HF_ZERO_TEST_PORT"])), authkey=_KEY)
    connection.send(rank)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    while True:
        try:
            module, name, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(1234)
            fn = getattr(importlib.import_module(module), name)
            answer = ("done", fn(*args))
        except BaseException as error:  # noqa: B902 - everything goes to the test, which decides
            answer = ("failed", type(error).__name__, "".join(traceback.format_exception(error)))
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve()
