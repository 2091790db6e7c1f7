"""Starts the processes of a run on this machine, through torch's own elastic agent, and brings their errors home."""

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero import errors
from hf_zero.errors import HfZeroError


LOOPBACK = "127.0.0.1"
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_INTERRUPTED = 128 + signal.SIGINT


class WorkerError(HfZeroError):
    """A process of the run died of something that hf_zero did not raise itself."""


@dataclass(frozen=True)
class _Report:
    """What one failed process wrote about its end."""

    rank: int
    timestamp: int
    message: str
    traceback: str

    @property
    def kind(self) -> type[HfZeroError] | None:
        kind = getattr(errors, self.message.partition(":")[0], None)
        return kind if isinstance(kind, type) and issubclass(kind, HfZeroError) else None


def launch(num_processes: int, function: Callable[..., None], *args: Any) -> None:
    """Runs `function(*args)` in `num_processes` processes that form one process group on loopback.

    Args:
        num_processes (`int`): How many.
        function (`Callable`): Importable by name; it finds its rank in the environment, as under torchrun.
        args: Picklable arguments.

    Raises:
        HfZeroError: The first error of the run, as the failing process raised it; [`WorkerError`] for any other end.
        KeyboardInterrupt: After SIGINT, where the processes had nothing to save, or were not to.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _prepare_environment(num_processes)
    # The agent logs every failure with banner and traceback; we read the error files and say it once.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:0",  # port 0: the store takes a free one
            max_restarts=0,
            local_addr=LOOPBACK,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            signals_to_handle="SIGHUP,SIGQUIT",  # after these the agent gives the processes 30 seconds
        )
        try:
            with _handing_on() as received:
                elastic_launch(config, _run)(function, *args)
        except ChildFailedError as failure:
            raise _end_of(Path(log_dir), failure, received, num_processes) from None
        except SignalException as stop:
            raise SystemExit(128 + stop.sigval) from None


def _run(function: Callable[..., None], *args: Any) -> None:
    """What each process does. It leaves the terminal's group, from which Ctrl-C would come a second time."""
    if hasattr(os, "setsid"):
        os.setsid()
    try:
        function(*args)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None  # torch would take it for an end without a word


@contextmanager
def _handing_on() -> Iterator[list[int]]:
    """Hands signals on to the processes, which take the time that they need to save. The second SIGINT kills them.

    Yields:
        `list[int]`: What has been received so far.
    """
    received: list[int] = []

    def hand_on(number: int, frame: Any) -> None:
        received.append(number)
        processes = multiprocessing.active_children()
        if not processes:
            raise _stopped_by(number)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL if received.count(signal.SIGINT) > 1 else number)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _end_of(log_dir: Path, failure: Any, received: list[int], num_processes: int) -> BaseException:
    """What to raise when processes have failed: they may have saved and left, as a signal told them to."""
    codes = {process.exitcode for process in failure.failures.values()}
    left = [number for number in HANDED_ON if 128 + number in codes]
    reports = _read_reports(log_dir)
    if (left or received) and not any(report.kind for report in reports):
        return _stopped_by((left or received)[0])
    return _root_cause(reports, failure, num_processes)


def _prepare_environment(num_processes: int) -> None:
    """Set before the processes start: thread pools and gloo read these once, at import."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _root_cause(reports: list[_Report], failure: Any, num_processes: int) -> HfZeroError:
    """When one rank fails the others lose touch with it: an error of ours comes first, then the earliest.

    Of a rank other than the first it is said which, unless all have raised the same.
    """
    reports = sorted(reports, key=lambda report: (report.kind is None, report.timestamp, report.rank))
    if not reports:
        rank, first = failure.get_first_failure()
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
            extra = content["extraInfo"]
            reports.append(
                _Report(int(path.parent.name), int(extra["timestamp"]), content["message"], extra["py_callstack"])
            )
        except (ValueError, KeyError, TypeError):
            continue  # cut off while it was written: the other reports are enough
    return reports
