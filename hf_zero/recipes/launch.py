"""Starts the processes of a run on this machine through torch's elastic agent, and raises their errors here."""

import contextlib
import json
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero import errors, parent
from hf_zero.errors import CommError, HfZeroError
from hf_zero.recipes.silence import silence


LOOPBACK = "127.0.0.1"
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_INTERRUPTED = 128 + signal.SIGINT

# What each process runs: first what binds it to its launcher, then imports. Until it can answer, SIGINT ends it.
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
    """A process of the run ended with an error that is none of hf_zero's own."""


@dataclass(frozen=True)
class _Report:
    """The error file of a failed process."""

    rank: int
    timestamp: float
    message: str
    traceback: str

    @property
    def kind(self) -> type[HfZeroError] | None:
        kind = getattr(errors, self.message.partition(":")[0], None)
        return kind if isinstance(kind, type) and issubclass(kind, HfZeroError) else None


def launch(num_processes: int, function: Callable[..., object], *args: Any) -> None:
    """Runs `function(*args)` in `num_processes` processes that form one process group on loopback, and that end when
    this process ends, however it does (on Linux).

    Args:
        function (`Callable`): Importable by name; it finds its rank in the environment, as under torchrun.
        args: Picklable arguments.

    Raises:
        HfZeroError: The first error of the run, as the failing process raised it; [`WorkerError`] for any other end.
        KeyboardInterrupt: After SIGINT, where the processes had nothing to save, or were not to.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    _prepare_environment(num_processes)
    # The agent logs every failure with banner and traceback; we read the error files and say it once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder:  # others cannot read it
        for rank in range(num_processes):  # which removes its file, since settings may hold a token
            job = pickle.dumps(sys.path) + pickle.dumps((function, args))
            Path(_job(folder, rank)).write_bytes(job)
        agent = _agent(num_processes, folder)
        try:
            with _handing_on(agent) as received:
                result = agent.run()
        except SignalException as stop:
            raise SystemExit(128 + stop.sigval) from None
        if result.is_failed():
            raise _end_of(Path(folder), result.failures, received, num_processes)


def _agent(num_processes: int, folder: str):
    """torch's agent, which starts the processes and ends all of them when one fails."""
    import torch.distributed as dist
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    listener = socket.create_server((LOOPBACK, 0))  # a store that opens its own socket listens on all addresses
    port = listener.getsockname()[1]
    rendezvous = StaticTCPRendezvous(LOOPBACK, port, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=600)
    rendezvous._store = dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=num_processes,
        entrypoint=sys.executable,
        args=("-c", _RANK, parent.__file__, os.getpid(), _job(folder, "${local_rank}")),
        rdzv_handler=rendezvous,
        max_restarts=0,
        local_addr=LOOPBACK,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))


def _job(folder: str | Path, rank: int | str) -> str:
    return os.path.join(folder, f"job-{rank}")


def run_rank(file) -> None:
    """Runs the function of a job, whose file is open at the function and its arguments. Each process calls it."""
    silence()
    from torch.distributed.elastic.multiprocessing.errors import record

    os.unlink(file.name)
    function, args = pickle.load(file)
    if os.environ["RANK"] != "0":
        sys.stdin = open(os.devnull)  # noqa: SIM115 - several processes cannot share what is typed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        record(function)(*args)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception:  # the launcher says it, for all
        raise SystemExit(1) from None


@contextmanager
def _handing_on(agent) -> Iterator[list[int]]:
    """Passes signals on to the processes, which then save, and yields what has been sent so far to end them. A second
    signal kills them."""
    from hf_zero.trainer.signals import is_another

    received: list[int] = []
    since: dict[int, float] = {}

    def hand_on(number: int, frame: Any) -> None:
        now = time.monotonic()
        if number in since and not is_another(number, since[number], now):
            return
        sent = signal.SIGKILL if number in since else number
        received.append(sent)
        since.setdefault(number, now)
        pids = [worker.id for worker in agent.get_worker_group().workers]
        if not pids or None in pids:  # not all have been started
            raise _stopped_by(number)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    agents_own = (signal.SIGHUP, signal.SIGQUIT)  # after these it gives the processes 30 seconds
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in agents_own)
    before = {number: signal.getsignal(number) for number in (*HANDED_ON, *agents_own)}
    for number in HANDED_ON:
        signal.signal(number, hand_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _end_of(folder: Path, failures: Mapping[int, Any], received: list[int], num_processes: int) -> BaseException:
    """Returns the error for processes that have failed, or that a signal has ended. Other ranks then fail because they
    cannot reach these."""
    codes = {failure.exitcode for failure in failures.values()}
    left = [number for number in HANDED_ON if 128 + number in codes]
    reports = _read_reports(folder)
    kinds = {report.kind for report in reports} - {None}
    if codes & {-number for number in received}:
        kinds -= {CommError}
    if (left or received) and not kinds:
        return _stopped_by((left or received)[0])
    return _root_cause(reports, failures, num_processes)


def _prepare_environment(num_processes: int) -> None:
    """Sets variables that thread pools, gloo and NCCL of the processes read when they start."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # groups of ranks have communicators of their own
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _root_cause(reports: list[_Report], failures: Mapping[int, Any], num_processes: int) -> HfZeroError:
    """Returns the first cause among the errors of several ranks: an error of hf_zero's, otherwise the earliest. It
    names the rank, unless that is the first, or all have raised the same."""
    reports = sorted(reports, key=lambda report: (report.kind in (None, CommError), report.timestamp, report.rank))
    killed = {rank: end for rank, end in failures.items() if end.exitcode < 0 and end.exitcode != -signal.SIGTERM}
    if not reports or (killed and reports[0].kind in (None, CommError)):
        own = {rank: end for rank, end in failures.items() if end.exitcode != -signal.SIGTERM}  # and not the agent's
        rank, first = min((killed or own or failures).items(), key=lambda item: item[1].timestamp)
        hint = "; the machine may be out of memory" if first.exitcode == -signal.SIGKILL else ""
        return WorkerError(f"rank {rank} ended without a word: exit code {first.exitcode} {first.signal_name()}{hint}")
    cause = reports[0]
    if cause.kind is not None:
        text, num_alike = cause.message.partition(": ")[2], sum(each.message == cause.message for each in reports)
        return cause.kind(text if cause.rank == 0 or num_alike == num_processes else f"rank {cause.rank}: {text}")
    print(cause.traceback, file=sys.stderr)
    return WorkerError(f"rank {cause.rank} failed: {cause.message}")


def _read_reports(log_dir: Path) -> list[_Report]:
    reports = []
    for path in log_dir.rglob("error.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))["message"]
            callstack = content["extraInfo"]["py_callstack"]
            reports.append(_Report(int(path.parent.name), path.stat().st_mtime, content["message"], callstack))
        except (ValueError, KeyError, TypeError):
            continue  # cut off while it was written: the other reports are enough
    return reports
