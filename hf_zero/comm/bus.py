"""Copies between device and host memory on separate streams, threads for work on completed copies, and conditions that
are computed on the device and checked on the host later.

The same code runs if the device is the CPU: streams and events then do nothing, and copies are synchronous.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.comm.base import Counters, Pending
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError, size_text


# The host waits for the oldest condition only when this many are pending; it is rarely more than one step ahead.
MAX_CHECKS = 16


class Transfer(Pending):
    """A copy in progress on a stream of the bus, with the event recorded after it."""

    def __init__(self, event, source: Tensor, streams: Streams):
        super().__init__(partial(streams.wait, event))
        self._event = event
        self.source = source  # keeps the source alive

    # `wait` makes the device's current stream wait, not the host: kernels issued afterwards see the values.

    def synchronize(self) -> None:
        """Blocks the host until the copy is done. The host may then read the target of a `down` copy, or write to the
        source of an `up` copy."""
        self._event.synchronize()

    def is_done(self) -> bool:
        """Whether `synchronize` would return immediately."""
        return self._event.query()


class Job(Pending):
    """Work on a thread of the bus. `wait` returns when it is done and raises its exception, if any."""

    def __init__(self, future: Future):
        super().__init__()
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._future.done()


class _Pages(mmap.mmap):
    """Private host memory in huge pages that calls `release` just before it is freed. A weak reference would call it
    later, when the memory may already be reused.

    The memory is not inherited by forked processes: after a fork, a write would move this process to a copy of the
    page while the device keeps using the page that the driver has locked.
    """

    release: Callable[[], None] | None = None
    _pid: int  # of the allocating process

    def __new__(cls, nbytes: int):
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows
        pages = super().__new__(cls, -1, nbytes, **private)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel may be built without huge pages
                    pages.madvise(getattr(mmap, advice))
        pages._pid = os.getpid()
        return pages

    def __del__(self):
        if self.release is not None:
            self.release()
        if os.getpid() != self._pid:
            _NOT_OURS.append(self)  # unmapping these addresses could hit memory of the forked process


_NOT_OURS: list[_Pages] = []


class Bus:
    """Copies between one device and the host, with one stream per direction. Bytes are counted as "up" (host to
    device) and "down"."""

    def __init__(self, device: torch.device, counters: Counters):
        self.device = device
        self.host = torch.device("cpu")
        self._counters = counters
        self.streams = Streams(device)
        self._ways = {way: self.streams.new() for way in ("up", "down")}
        self._memory: dict[int, int] = {}  # size of the allocated host memory, by address
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._jobs: list[Job] = []
        self._failure: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype, *, locked: bool = True) -> Tensor:
        """Allocates a zero-filled 1-D tensor in host memory, page-locked by default so that the device can copy
        asynchronously. The memory is freed when no tensor uses it any longer."""
        nbytes = max(1, numel * dtype.itemsize)
        pages = _Pages(nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        self._memory[address] = nbytes
        # torch's allocator for page-locked memory rounds up to a power of two
        unlock = self._lock(address, nbytes) if locked and self.device.type == "cuda" else None
        pages.release = partial(_release, self._memory, address, unlock, os.getpid())
        return memory[: numel * dtype.itemsize].view(dtype)

    def _lock(self, address: int, nbytes: int) -> Callable[[int], object]:
        """Page-locks memory and returns the function that unlocks it. Raises [`ConfigError`] if the driver fails."""
        backend = torch.get_device_module(self.device)
        driver, streams = backend.cudart(), self.streams
        try:
            backend.check_error(driver.cudaHostRegister(address, nbytes, 0))
        except RuntimeError as error:  # "out of memory", without saying which memory
            del self._memory[address]
            raise ConfigError(
                f"offload: the driver cannot page-lock another {size_text(nbytes)} of host memory, with "
                f"{size_text(self.host_nbytes)} in use for offload ({error}); offload less (offload_fraction), use "
                "offload_dir, or give the process more memory"
            ) from error

        def unlock(address: int) -> None:
            with streams.on(streams.current()):  # a thread whose current device is another one may free the memory
                driver.cudaHostUnregister(address)

        return unlock

    @property
    def host_nbytes(self) -> int:
        """The host memory in use, in bytes."""
        return sum(self._memory.values())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory allocated by `empty`."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        """Copies host memory to the device, after the work already issued to the current stream.

        Args:
            device (`Tensor`): 1-D, on the device, overwritten.
            host (`Tensor`): 1-D, on the host, with the same dtype. It may be modified after `synchronize`.
        """
        return self._copy("up", device, host)

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        """Copies device memory to the host, after the work already issued to the current stream.

        Args:
            host (`Tensor`): 1-D, on the host, overwritten. It may be read after `synchronize`.
            device (`Tensor`): 1-D, on the device, with the same dtype. It may be modified after `wait`.
        """
        return self._copy("down", host, device)

    def _copy(self, way: str, target: Tensor, source: Tensor) -> Transfer:
        with self.on_side_stream(way):
            target.copy_(source, non_blocking=True)
            event = self.streams.record(self._ways[way])
        self._counters.add(way, source.nbytes)
        return Transfer(event, source, self.streams)

    def current_stream(self) -> Any:
        """Returns the stream to which this thread currently issues work."""
        return self.streams.current()

    def synchronize(self) -> None:
        """Blocks the host until all copies are done."""
        _synchronize(self.streams, self._ways)

    def synchronize_before_end(self, owner: object) -> None:
        """Waits for all copies before an object is freed together with memory that they use."""
        weakref.finalize(owner, _synchronize, self.streams, self._ways).atexit = False

    @contextmanager
    def on_side_stream(self, way: str) -> Iterator[None]:
        """Issues work inside the context to the stream "up" or "down", after the work already issued to the current
        stream."""
        with self.streams.behind(self._ways[way]):
            yield

    def later(self, work: Callable[[], object], lane: str = "arrivals", *, always: bool = False) -> Pending:
        """Runs a function on a thread of the bus, without gradients, after earlier jobs of the same lane: "arrivals"
        for work on completed copies, "update" for long work. The current stream of the thread is that of the caller,
        so copies to the device wait for what reads their targets there. The function may add jobs to another lane.
        After a job fails, later jobs are skipped unless they were added with `always`, and `wait_for_jobs` raises."""
        if lane not in self._lanes:
            name = f"hf_zero-{lane}"
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=use_own_cores)
        job = Job(self._lanes[lane].submit(self._do, work, self.current_stream(), always))
        self._jobs.append(job)
        return job

    @property
    def has_failed(self) -> bool:
        """Whether a job has failed since the last `wait_for_jobs`."""
        return self._failure is not None

    def _do(self, work: Callable[[], object], stream: Any, always: bool) -> None:
        if self._failure is not None and not always:
            raise self._failure
        try:
            self.streams.set_device()
            with self.streams.on(stream), torch.no_grad():
                work()
        except BaseException as error:
            self._failure = error
            raise

    def wait_for_jobs(self) -> None:
        """Waits until all jobs are done. Raises the exception of the first one that failed."""
        failure = None
        while self._jobs:  # a job may add further jobs
            try:
                self._jobs[0].wait()
            except BaseException as error:
                if not self._jobs[0].is_done():
                    raise  # the wait was interrupted, not the job: the next call waits for it
                failure = failure or error
            del self._jobs[0]
        self._failure = None
        if failure is not None:
            raise failure


def use_own_cores() -> None:
    """Lets operators called by this thread use this rank's share of the host's cores.

    torchrun sets OMP_NUM_THREADS=1 unless the user has set it, which would run optimizer steps on the host on one
    core. A value set by the user is kept: any other, or the 1 that torchrun itself was started with."""
    if os.environ.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in os.environ and not _user_set_threads():
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _user_set_threads() -> bool:
    with suppress(psutil.Error):  # the system does not tell
        for process in psutil.Process().parents():
            environment = process.environ()  # as the process was started
            if "TORCHELASTIC_RUN_ID" not in environment:  # the launcher
                return "OMP_NUM_THREADS" in environment
    return False


def _synchronize(streams: Streams, ways: dict) -> None:
    for stream in ways.values():
        streams.record(stream).synchronize()


def _release(memory: dict[int, int], address: int, unlock: Callable[[int], object] | None, pid: int) -> None:
    memory.pop(address, None)
    if unlock is not None and os.getpid() == pid:  # a forked process must not call the driver
        unlock(address)


@dataclass(frozen=True)
class _Check:
    """A condition that is being copied to the host, with the functions to call if it does not hold."""

    arriving: Transfer
    holds: Tensor  # on the host
    refuse: Callable[[], None]
    undo: Callable[[], None]

    def is_met(self) -> bool:
        """Waits for the condition and returns it. Its memory on the device may then be reused."""
        self.arriving.synchronize()
        self.arriving.wait()
        return bool(self.holds)


class LateChecks:
    """Conditions that must hold on all ranks. With `reads_at_once`, where the host waits for the device anyway, each
    is checked immediately; otherwise after it has been copied to the host.

    [Note: one decision of all ranks] Every rank computes the same bits but sees them at a different time. The ranks
    therefore exchange whether any of them has seen a failed condition (`has_failed`), and then all call `settle`.
    """

    def __init__(self, bus: Bus, reads_at_once: bool):
        self._bus = bus
        self._reads_at_once = reads_at_once
        self._checks: deque[_Check] = deque()
        self._unused: list[Tensor] = []  # host memory for conditions

    def expect(self, holds: Tensor, refuse: Callable[[], None], undo: Callable[[], None] = lambda: None) -> None:
        """Adds a condition, a 0-d bool that is the same on all ranks. Collective. If conditions fail, every rank calls
        `undo` of each of them, then `refuse` of the first, which raises and may communicate."""
        if self._reads_at_once:
            if not bool(holds):
                undo()
                refuse()
            return
        if not self._unused:
            # torch's own page-locked memory: every run needs these bytes, even if the driver locks no other memory
            locked = self._bus.device.type == "cuda"
            memory = torch.empty(MAX_CHECKS, dtype=torch.bool, device=self._bus.host, pin_memory=locked)
            self._unused += memory.split(1)
        target = self._unused.pop()
        self._checks.append(_Check(self._bus.down(target, holds.reshape(1)), target, refuse, undo))

    def has_failed(self) -> bool:
        """Whether a condition that has been copied to the host does not hold. Removes those that hold."""
        while self._checks and (self._checks[0].arriving.is_done() or len(self._checks) > MAX_CHECKS):
            if not self._checks[0].is_met():
                return True
            self._unused.append(self._checks.popleft().holds)
        return False

    def settle(self) -> None:
        """Waits for all conditions and raises if any does not hold. Collective."""
        checks, self._checks = self._checks, deque()
        failed = [check for check in checks if not check.is_met()]  # waits for each: its memory may then be reused
        self._unused += [check.holds for check in checks]
        for check in failed:
            check.undo()
        for check in failed[:1]:
            check.refuse()
