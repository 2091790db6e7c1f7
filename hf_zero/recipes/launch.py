"""Starts the processes of a run on this machine with torch's elastic multiprocessing, and raises their first error."""

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_zero import errors, parent
from hf_zero.errors import CommError, ConfigError, HfZeroError
from hf_zero.recipes.silence import silence


LOOPBACK = "127.0.0.1"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)

# Exit codes of ranks that torch ends after another one has failed.
_ENDED_BY_TORCH = (-signal.SIGTERM, 128 + signal.SIGTERM)

# The code of each process. It first binds itself to the launcher; SIGINT ends it until the imports are done.
_RANK = """
import pickle, runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
runpy.run_path(sys.argv[1])["end_with_parent"](int(sys.argv[2]))
with open(sys.argv[3], "rb") as file:
    sys.path[:] = pickle.load(file)
    from hf_zero.recipes.launch import run_rank
    run_rank(file)
"""


class WorkerError(HfZeroError):
    """A process of the run was killed, or raised an exception that is not one of hf_zero's."""


def launched_world_size(num_processes: int | None) -> int | None:
    """Returns the number of processes that a launcher such as torchrun has started; `None` without one. Raises
    [`ConfigError`] if its variables are incomplete, or contradict `--num_processes`."""
    from hf_zero.accelerator.environment import launched_ranks

    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num_processes {num_processes}: expected 1 or more")
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        return None
    world_size = launched_ranks()
    if num_processes not in (None, world_size):
        raise ConfigError(
            f"--num_processes {num_processes}, but the launcher set WORLD_SIZE={world_size}; leave it out"
        )
    return world_size


def run_on(num_processes: int | None, function: Callable[..., object], *values: Any) -> None:
    """Runs a function in this process, if it is one of several or the only one, and otherwise in new ones."""
    if launched_world_size(num_processes) is None and (num_processes or 1) > 1:
        launch(num_processes or 1, function, *values)
    else:
        function(*values)


def launch(num_processes: int, function: Callable[..., object], *values: Any) -> None:
    """Runs `function(*values)` in `num_processes` processes that form a process group on loopback. On Linux they end
    when this process ends.

    Args:
        num_processes (`int`): number of processes.
        function (`Callable`): importable by name. It finds its rank in the environment, as under torchrun.
        values: picklable arguments.

    Raises:
        HfZeroError: the first error of the run, as the failing process raised it, or [`WorkerError`].
        KeyboardInterrupt: after SIGINT, when the processes have ended.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    _set_environment(num_processes)
    # torch logs each failure with a banner and a traceback; the error that is raised here replaces them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The processes meet at a store of the launcher, as under torchrun. One of rank 0 would be open to the network.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    shared = {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes)),
        **{"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": "0"},
    }
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder:  # readable by this user only
        args, envs = {}, {}
        for rank in range(num_processes):
            job = Path(folder, f"job-{rank}")
            job.write_bytes(pickle.dumps(sys.path) + pickle.dumps((sys.argv[0], function, values)))
            args[rank] = ("-c", _RANK, parent.__file__, os.getpid(), job)
            envs[rank] = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids: list[int] = []
        with _forwarding(pids) as received:
            logs = DefaultLogsSpecs(log_dir=folder)
            processes = start_processes("default", sys.executable, args, envs, logs)
            try:
                pids += processes.pids().values()
                result = processes.wait(period=0.1)
            finally:
                processes.close()
        if result.is_failed():
            raise error_of(result.failures, received)


def run_rank(file: Any) -> None:
    """Runs the function of a job file. Each process calls it."""
    silence()
    from torch.distributed.elastic.multiprocessing.errors import record

    os.unlink(file.name)  # the arguments may hold a token
    sys.argv[0], function, args = pickle.load(file)  # messages name the program as it was called
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        record(function)(*args)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:  # `record` has written it for the launcher
        raise SystemExit(1) from None


@contextlib.contextmanager
def _forwarding(pids: list[int]) -> Iterator[list[int]]:
    """Forwards signals to the processes, once they have been started. They save a checkpoint and end; a second signal
    kills them. Yields the list of the signals that were sent."""
    from hf_zero.trainer.signals import is_another

    sent: list[int] = []
    first: dict[int, float] = {}  # time of the first signal, by number

    def forward(number: int, frame: Any) -> None:
        now = time.monotonic()
        if number in first and not is_another(number, first[number], now):
            return
        sent.append(signal.SIGKILL if number in first else number)
        first.setdefault(number, now)
        if not pids:
            raise _stopped_by(number)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent[-1])

    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    before = {number: signal.signal(number, forward) for number in FORWARDED}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def error_of(failures: Mapping[int, Any], sent: list[int]) -> BaseException:
    """Returns the error of the rank that failed first. The message names the rank, unless rank 0 has raised it too.

    Args:
        failures (`Mapping[int, ProcessFailure]`): torch's record of each process that failed, by rank.
        sent (`list[int]`): the signals that were forwarded to the processes.
    """
    messages = {
        rank: failure.message["message"] if isinstance(failure.message, dict) else ""  # the exception that it recorded
        for rank, failure in failures.items()
    }

    def order(rank: int) -> tuple:  # recorded exceptions first, processes that torch has ended with SIGTERM last
        failure = failures[rank]
        moment = os.path.getmtime(failure.error_file) if messages[rank] else failure.timestamp  # in whole seconds
        return not messages[rank], failure.exitcode == -signal.SIGTERM, moment

    ranks = sorted(failures, key=order)
    kinds = {rank: getattr(errors, messages[rank].partition(":")[0], None) for rank in ranks}
    codes = {rank: failures[rank].exitcode for rank in ranks}
    # Ranks that have lost another one raise a CommError, or an error of torch.
    own = [rank for rank in ranks if kinds[rank] not in (None, CommError)]
    stops = [number for number in FORWARDED if 128 + number in codes.values()] or sent
    was_ended = any(-number in codes.values() for number in sent)  # by a signal for which it had no handler yet
    if stops and not own and (was_ended or kinds[ranks[0]] is None):
        return _stopped_by(stops[0])
    killed = [rank for rank in ranks if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
    unknown = [rank for rank in ranks if kinds[rank] is None and messages[rank]]
    users = [rank for rank in unknown if not _has_lost_another(messages[rank])]
    silent = [rank for rank in ranks if not messages[rank] and codes[rank] not in _ENDED_BY_TORCH]
    first = next(iter(own or killed or users or silent or ranks))
    if not messages[first]:
        hint = "; the machine may be out of memory" if codes[first] == -signal.SIGKILL else ""
        name = failures[first].signal_name()
        return WorkerError(f"rank {first} ended without a message: exit code {codes[first]} {name}{hint}")
    if kinds[first] is None:
        print(failures[first].message["extraInfo"]["py_callstack"], file=sys.stderr)
        return WorkerError(f"rank {first} failed: {messages[first]}")
    text = messages[first].partition(": ")[2]
    return kinds[first](text if messages.get(0) == messages[first] else f"rank {first}: {text}")


def _has_lost_another(message: str) -> bool:
    """Whether a rank has failed because it could not reach another one."""
    from hf_zero.comm.ranks import is_of_transport

    return message.startswith("Dist") or is_of_transport(RuntimeError(message))


def _set_environment(num_processes: int) -> None:
    """Sets variables that thread pools, gloo and NCCL of the processes read, unless they are set."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_processes > num_cores:
        print(f"hf-zero: --num_processes {num_processes}: they share {num_cores} cores", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
