"""Runs functions on several real ranks of this machine, for tests and for benchmarks.

Importing torch and transformers takes longer than most tests. Ranks are therefore forked from Python's fork server,
which has imported both (`tests/preload.py`) and runs nothing else, and tests reuse them. If a rank fails or hangs, all
ranks of its group are killed, and the next test gets new ones. The same happens if a rank has accumulated threads:
each gloo group has threads that wake up a hundred times a second, and reference cycles keep groups alive.
"""

import atexit
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from hf_zero.parent import end_with_parent
from tests.hosts.network import Host


_KEPT: dict[int, "_Group"] = {}
# A group is not reused if one of its ranks has more threads.
_MAX_THREADS = 64
# Seconds that the other ranks get after one has raised, because they may wait for it. They notice a rank that died.
_GRACE = 5.0
# Exit code of a rank if the fork server has ended and cannot report it.
_SERVER_GONE = 255
# Seconds that a rank which has not failed gets to leave its group.
_LEAVING = 10.0


def run_ranks(fn: Callable, num_ranks: int, *args, timeout: float = 120.0) -> list:
    """Calls `fn(*args)` on every rank of a process group, and returns the results in rank order.

    Args:
        fn: a module-level function of a test module; arguments and result must pickle. The process group is
            initialized (also for one rank), the generator is seeded, and `direct.MIN_NUMEL` is copied from here.
        num_ranks (`int`): number of processes.
        timeout (`float`): seconds until all ranks are killed and the test fails.

    Raises:
        `RemoteError`: with the traceback of the first rank that failed.
    """
    group = _KEPT.get(num_ranks)
    if group is not None and group.was_killed():
        _KEPT.pop(num_ranks).end()
        group = None
    if group is None:
        group = _KEPT[num_ranks] = _Group(num_ranks)
    try:
        return group.call(fn, args, timeout)
    except BaseException:
        group.is_worn = True
        raise
    finally:
        if group.is_worn:
            group.end()
            del _KEPT[num_ranks]


def ranks(num_ranks: int | str, *, timeout: float = 120.0) -> Callable[[Callable], Callable]:
    """Decorates a test whose body runs on every rank, as with `run_ranks`. Its arguments (parameters and fixtures such
    as `tmp_path`) must pickle; fixtures run in the process of the test, and `monkeypatch` does not reach the ranks.

    Args:
        num_ranks (`int` or `str`): number of processes, or the parameter of the test that gives it.
        timeout (`float`): seconds until all ranks are killed and the test fails.
    """

    def decorate(test: Callable) -> Callable:
        names = list(inspect.signature(test).parameters)

        @wraps(test)
        def on_ranks(**given):
            count = given[num_ranks] if isinstance(num_ranks, str) else num_ranks
            run_ranks(test, count, *(given[name] for name in names), timeout=timeout)

        on_ranks.body = test
        return on_ranks

    return decorate


def run_new_ranks(
    fn: Callable,
    num_ranks: int,
    *args,
    timeout: float = 120.0,
    backend: str = "gloo",
    start: str = "forkserver",
    num_threads: int = 1,
    hosts: Sequence[Host] = (),
) -> list:
    """Like `run_ranks`, in new processes that end with the call.

    Args:
        backend (`str`): of the process group.
        start (`str`): how processes start; use "spawn" with CUDA, which a forked process may not be able to open.
        num_threads (`int`): threads of each rank.
        hosts (`Sequence[Host]`): the hosts, with equal numbers of ranks; by default the host of this process.
    """
    settings = {"start": start, "num_threads": num_threads, "hosts": hosts}
    group, patience = _Group(num_ranks, backend, timeout, **settings), 0.0
    try:
        results = group.call(fn, args, timeout)
        patience = _LEAVING
        return results
    finally:
        group.end(patience)


def start_ranks(fn: Callable, num_ranks: int, *args) -> list[BaseProcess]:
    """Starts processes that call `fn(*args)`, with the environment variables of torch's launcher. The caller
    initializes the process group and ends the processes."""
    return _start(fn, [args] * num_ranks)


def run_program(argv: list[str], folder: Path, num_ranks: int = 1, timeout: float = 240.0) -> list[CompletedProcess]:
    """Runs `python ARGV` like a launcher such as torchrun, on ranks that have imported torch and transformers.

    Args:
        argv (`list[str]`): a script and its arguments, or `-m`, a module and its arguments.
        folder (`Path`): working directory.
        num_ranks (`int`): number of ranks; a single rank runs without a launcher's environment.
        timeout (`float`): seconds until the ranks are killed.

    Returns:
        `list[CompletedProcess]`: by rank.
    """
    with tempfile.TemporaryDirectory() as said:
        ranks = start_program(argv, folder, Path(said), num_ranks)
        deadline = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        files = [[Path(said, f"{rank}.{name}") for name in ("out", "err")] for rank in range(num_ranks)]
        texts = [[file.read_text(encoding="utf-8") for file in own] for own in files]
    return [CompletedProcess(argv, process.exitcode, *own) for process, own in zip(ranks, texts)]


def start_program(argv: list[str], folder: Path, said: Path, num_ranks: int = 1) -> list[BaseProcess]:
    """Like `run_program`, without waiting. Each rank is in its own process group, which the caller ends.

    Args:
        said (`Path`): folder for the output of the ranks: `0.out`, `0.err` and so on.
    """
    return start_ranks(_run_program, num_ranks, argv, str(folder), str(said))


def start_fork_server() -> None:
    """Starts the process from which ranks are forked, without waiting for its imports."""
    _context("forkserver")


def forget_ranks() -> None:
    """Ends all kept ranks. The next test gets new ones, which have no group but the world."""
    while _KEPT:
        _KEPT.popitem()[1].end()


atexit.register(forget_ranks)  # before that of multiprocessing, which would wait for them


class RemoteError(AssertionError):
    """A rank failed; the message is its traceback. `kind` is the name of the exception's class."""

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(f"rank {rank}: {text}")
        self.kind = kind


def free_port() -> int:
    """Returns an unused TCP port below the range from which Linux assigns ports to connections."""
    while True:
        port = random.SystemRandom().randrange(2**14, 2**15)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


class _Group:
    """Ranks of one process group. `is_worn`: they must not be reused."""

    def __init__(self, num_ranks: int, backend: str = "gloo", limit: float = 60.0, **settings):
        self.is_worn = False
        pipes = [multiprocessing.Pipe() for _ in range(num_ranks)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = _start(_serve, [(theirs, backend, limit) for _, theirs in pipes], **settings)
        for _, theirs in pipes:
            theirs.close()

    def call(self, fn: Callable, args: tuple, timeout: float) -> list:
        direct = sys.modules.get("hf_zero.engine.direct")
        job = pickle.dumps((fn.__module__, fn.__qualname__, args, direct and direct.MIN_NUMEL))
        for connection in self._connections:
            with suppress(BrokenPipeError):  # a rank has ended since the last test; `_answer` reports how
                connection.send_bytes(job)
        answers = self._answers(timeout)
        # the cause first, then the ranks that waited for it in vain
        waited = {"CommError": 1, "Timeout": 2}
        failures = [(rank, *answer[1:]) for rank, answer in enumerate(answers) if answer[0] == "failed"]
        if failures:
            raise RemoteError(*min(failures, key=lambda failure: waited.get(failure[1], 0)))
        self.is_worn |= any(num_threads > _MAX_THREADS for _, _, num_threads in answers)
        return [result for _, result, _ in answers]

    def was_killed(self) -> bool:
        """Returns whether a rank, or the fork server with all ranks, was killed between two tests."""
        for connection, process in zip(self._connections, self._processes):
            if connection.poll():  # closed: the fork server is about to report how the rank ended
                process.join(_GRACE)
        return any(process.exitcode in (-signal.SIGKILL, _SERVER_GONE) for process in self._processes)

    def _answers(self, timeout: float) -> list[tuple]:
        """Returns, for each rank, its result and number of threads, or how it failed."""
        answers: list[tuple] = [()] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        limit, deadline = timeout, time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready or list(waiting):
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank) if ready else self._no_answer(rank, limit)
                has_raised = answers[rank][0] == "failed" and answers[rank][1] != "Died"
                if has_raised and time.monotonic() + _GRACE < deadline:
                    limit, deadline = _GRACE, time.monotonic() + _GRACE
        return answers

    def _answer(self, rank: int) -> tuple:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_GRACE)
            return "failed", "Died", f"the process ended with exit code {self._processes[rank].exitcode}"

    def _no_answer(self, rank: int, limit: float) -> tuple:
        """Returns a failure with the stack of each thread of the rank."""
        pid = self._processes[rank].pid
        os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)
        stacks = _stacks_file(pid).read_text() if _stacks_file(pid).exists() else ""
        return "failed", "Timeout", f"no answer within {limit:.0f} s\n{stacks}"

    def end(self, patience: float = 0.0) -> None:
        """Gives the ranks some seconds to end, then kills them and the processes that they have started."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            if patience:
                process.join(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have created its process group yet
            process.join()
            _stacks_file(process.pid).unlink(missing_ok=True)


@cache
def _context(start: str) -> BaseContext:
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["tests.preload"])
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path):
            forkserver.ensure_running()
    return context


def _start(
    fn: Callable,
    args: list[tuple],
    start: str = "forkserver",
    num_threads: int = 1,
    hosts: Sequence[Host] = (),
) -> list[BaseProcess]:
    """Starts a rank for each tuple of arguments."""
    num_local = len(args) // max(1, len(hosts))
    env = {
        **os.environ,
        "WORLD_SIZE": str(len(args)),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(num_threads),
    }
    if hosts:
        if env.get("GLOO_SOCKET_IFNAME") == "lo":  # set by a recipe that this process has launched
            del env["GLOO_SOCKET_IFNAME"]
    processes = []
    for rank, own in enumerate(args):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank % num_local)}
        host = hosts[rank // num_local] if hosts else None
        processes.append(_context(start).Process(target=_be_rank, args=(env | ranks, host, fn, own)))
        processes[-1].start()
    return processes


def _be_rank(env: dict[str, str], host: Host | None, fn: Callable, args: tuple) -> None:
    os.setsid()  # processes that it starts are killed with it
    _leave_fork_server()
    end_with_parent(os.getppid())
    if host is not None:
        host.enter()
    os.environ.clear()
    os.environ.update(env)
    import torch

    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    fn(*args)


def _leave_fork_server() -> None:
    """Closes the descriptor by which this rank keeps the fork server running. The server and its ranks then end with
    the process that started them."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _run_program(argv: list[str], folder: str, said: str) -> None:
    from hf_zero.accelerator.environment import LAUNCHER_VARIABLES

    if os.environ["WORLD_SIZE"] == "1":
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with open(f"{said}/{os.environ.get('RANK', 0)}.{name}", "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(folder)
    sys.path.insert(0, folder)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def _serve(connection: Connection, backend: str, limit: float) -> None:
    """Runs jobs, and answers with the result or the error, and with the number of threads of this process."""
    import torch.distributed as dist

    with open(_stacks_file(os.getpid()), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        joined = _tried(dist.init_process_group, backend, timeout=timedelta(seconds=limit))
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                break
            connection.send_bytes(pickle.dumps(joined if joined[0] == "failed" else _tried(_run, job)))
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(job: bytes):
    import torch

    from hf_zero.engine import direct

    module, name, args, min_numel = pickle.loads(job)
    direct.MIN_NUMEL = direct.MIN_NUMEL if min_numel is None else min_numel
    torch.manual_seed(1234)
    fn = getattr(importlib.import_module(module), name)
    return getattr(fn, "body", fn)(*args)  # `body`: the test that `ranks` decorates


def _tried(fn: Callable, *args, **kwargs) -> tuple:
    import psutil

    try:
        return "done", fn(*args, **kwargs), psutil.Process().num_threads()
    except BaseException as error:  # noqa: B902 - reported to the caller
        return "failed", type(error).__name__, "".join(traceback.format_exception(error))


def _stacks_file(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"hf-zero-tests-{pid}.stacks")
