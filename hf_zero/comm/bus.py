"""Copies between device and host memory on separate streams, and threads that work on what has arrived.

The same code runs where the device is the CPU itself: its streams and events do nothing, and copies are then made at
once. Also conditions that a device computes, and that the host reads when they have arrived.
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

import torch
from torch import Tensor

from hf_zero.comm.base import Counters, Pending
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError, size_text


# The host waits for the oldest condition only when so many are on their way; it is seldom more than one step ahead.
MAX_CHECKS = 16


class Transfer(Pending):
    """A copy under way on a stream of the bus, with the event that is recorded behind it."""

    def __init__(self, event, source: Tensor, streams: Streams):
        super().__init__(partial(streams.wait, event))
        self._event = event
        self.source = source  # what is read, which lives as long as this object

    # `wait` makes the device's current stream wait, and not the host: kernels issued after it find the values.

    def synchronize(self) -> None:
        """Lets the host wait until the copy is made. It may then read the target of a copy down, or write to the
        source of a copy up."""
        self._event.synchronize()

    def is_done(self) -> bool:
        """Whether `synchronize` would return at once."""
        return self._event.query()


class Job(Pending):
    """Work on a thread of the bus. `wait` returns when it is done, and raises what it raised."""

    def __init__(self, future: Future):
        super().__init__()
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._future.done()


class _Pages(mmap.mmap):
    """Private host memory in huge pages, which reports when it is about to be freed. A weak reference would report it
    later, when the memory may be in use again.

    A forked process does not get it: after a fork, a write would move this process to a copy of the page, while the
    device goes on with the page that the driver has locked.
    """

    release: Callable[[], None] | None = None
    _pid: int  # of the process that has allocated it

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
            _NOT_OURS.append(self)  # to unmap these addresses might hit what the forked process has put there


_NOT_OURS: list[_Pages] = []


class Bus:
    """Copies between one device and the host, with a stream for each direction, and counts the bytes as "up" (host to
    device) and "down"."""

    def __init__(self, device: torch.device, counters: Counters):
        self.device = device
        self.host = torch.device("cpu")
        self._counters = counters
        self.streams = Streams(device)
        self._ways = {way: self.streams.new() for way in ("up", "down")}
        self._memory: dict[int, int] = {}  # bytes of the host memory handed out, by address
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._jobs: list[Job] = []
        self._failure: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype, *, locked: bool = True) -> Tensor:
        """Allocates host memory, 1-D and zero, by default page-locked, so that the device can copy from and to it by
        itself. It is freed when no tensor uses it."""
        nbytes = max(1, numel * dtype.itemsize)
        pages = _Pages(nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        self._memory[address] = nbytes
        # torch's own allocator of such memory would round up to a power of two
        unlock = self._lock(address, nbytes) if locked and self.device.type == "cuda" else None
        pages.release = partial(_release, self._memory, address, unlock, os.getpid())
        return memory[: numel * dtype.itemsize].view(dtype)

    def _lock(self, address: int, nbytes: int) -> Callable[[int], object]:
        """Page-locks memory, and returns what unlocks it. Raises [`ConfigError`] when the driver refuses."""
        backend = torch.get_device_module(self.device)
        driver = backend.cudart()
        try:
            backend.check_error(driver.cudaHostRegister(address, nbytes, 0))
        except RuntimeError as error:  # which says "out of memory", and not whose
            del self._memory[address]
            raise ConfigError(
                f"offload: the driver page-locks no further {size_text(nbytes)} of the host's memory, with "
                f"{size_text(self.host_nbytes)} in use for offload ({error}); offload less (offload_fraction), use "
                "offload_dir, or give the process more memory"
            ) from error
        return driver.cudaHostUnregister

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory in use."""
        return sum(self._memory.values())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that `empty` has allocated."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        """Copies host memory to the device, after the work that the current stream has so far. `device`: 1-D, on the
        device, overwritten; `host`: 1-D, on the host, the same dtype; it may be written again after a
        `synchronize`."""
        return self._copy("up", device, host)

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        """Copies device memory to the host, 1-D and of one dtype, after the work that the current stream has so far.
        The host's is to be read after a `synchronize`, the device's to be written again after a `wait`."""
        return self._copy("down", host, device)

    def _copy(self, way: str, target: Tensor, source: Tensor) -> Transfer:
        with self.on_side_stream(way):
            target.copy_(source, non_blocking=True)
            event = self.streams.record(self._ways[way])
        self._counters.add(way, source.nbytes)
        return Transfer(event, source, self.streams)

    def current_stream(self) -> Any:
        """Returns the stream of the device to which this thread issues work now."""
        return self.streams.current()

    def synchronize(self) -> None:
        """Lets the host wait until all copies are made."""
        _synchronize(self.streams, self._ways)

    def synchronize_before_end(self, owner: object) -> None:
        """Lets the host wait until all copies are made before an object goes, with memory that they use."""
        weakref.finalize(owner, _synchronize, self.streams, self._ways).atexit = False

    @contextmanager
    def on_side_stream(self, way: str) -> Iterator[None]:
        """Issues the work of the context to the stream "up" or "down", after the work that the current stream has so
        far."""
        with self.streams.behind(self._ways[way]):
            yield

    def later(self, work: Callable[[], object], lane: str = "arrivals", *, always: bool = False) -> Pending:
        """Runs a function, which may itself give work to another lane, on a thread of the bus, without gradients,
        after the earlier jobs of the same lane: "arrivals" for what has arrived, "update" for what may take long.
        After a job that failed, later ones do not run, but those that `always` do, and `wait_for_jobs` raises."""
        if lane not in self._lanes:
            begin = use_own_cores if lane == "update" else None
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"hf_zero-{lane}", initializer=begin)
        job = Job(self._lanes[lane].submit(self._do, work, always))
        self._jobs.append(job)
        return job

    @property
    def has_failed(self) -> bool:
        """Whether a job has failed since the last `wait_for_jobs`."""
        return self._failure is not None

    def _do(self, work: Callable[[], object], always: bool) -> None:
        if self._failure is not None and not always:
            raise self._failure
        try:
            self.streams.set_device()
            with torch.no_grad():
                work()
        except BaseException as error:
            self._failure = error
            raise

    def wait_for_jobs(self) -> None:
        """Waits until all jobs are done. Raises what the first one that failed raised."""
        failure = None
        while self._jobs:  # a job may add others
            try:
                self._jobs[0].wait()
            except BaseException as error:
                if not self._jobs[0].is_done():
                    raise  # the wait was broken off, and the job was not: the next call waits for it
                failure = failure or error
            del self._jobs[0]
        self._failure = None
        if failure is not None:
            raise failure


def use_own_cores() -> None:
    """Lets operators that this thread calls run on this rank's share of the host's cores.

    torchrun sets OMP_NUM_THREADS=1 unless the user has set it, and an optimizer step on the host would run on one
    core. Any other number is the user's, and stays."""
    if os.environ.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _synchronize(streams: Streams, ways: dict) -> None:
    for stream in ways.values():
        streams.record(stream).synchronize()


def _release(memory: dict[int, int], address: int, unlock: Callable[[int], object] | None, pid: int) -> None:
    memory.pop(address, None)
    if unlock is not None and os.getpid() == pid:  # a forked process may not ask the driver
        unlock(address)


@dataclass(frozen=True)
class _Check:
    """A condition on its way to the host, and what raises where it does not hold."""

    arriving: Transfer
    holds: Tensor  # on the host
    refuse: Callable[[], None]
    undo: Callable[[], None]

    def is_met(self) -> bool:
        """Waits for the condition, and returns it. Its memory on the device may then be given to others."""
        self.arriving.synchronize()
        self.arriving.wait()
        return bool(self.holds)


class LateChecks:
    """Conditions that have to hold on all ranks alike. Where the host waits for the device anyway (`reads_at_once`),
    each is read at once; else after it has arrived.

    [Note: one decision of all ranks] Every rank computes the same bits, but learns them at a time of its own. So the
    ranks exchange whether one of them knows of a condition that does not hold (`has_failed`), and then all `settle`.
    """

    def __init__(self, bus: Bus, reads_at_once: bool):
        self._bus = bus
        self._reads_at_once = reads_at_once
        self._checks: deque[_Check] = deque()
        self._unused: list[Tensor] = []  # memory of the host for conditions

    def expect(self, holds: Tensor, refuse: Callable[[], None], undo: Callable[[], None] = lambda: None) -> None:
        """Adds a condition, 0-d bool, the same on all ranks, which all call it. If conditions fail, every rank calls
        `undo` of each of them, then `refuse` of the first, which raises and may communicate."""
        if self._reads_at_once:
            if not bool(holds):
                undo()
                refuse()
            return
        if not self._unused:
            # torch's own page-locked memory: every run needs these bytes, also where the driver locks no other memory
            locked = self._bus.device.type == "cuda"
            memory = torch.empty(MAX_CHECKS, dtype=torch.bool, device=self._bus.host, pin_memory=locked)
            self._unused += memory.split(1)
        target = self._unused.pop()
        self._checks.append(_Check(self._bus.down(target, holds.reshape(1)), target, refuse, undo))

    def has_failed(self) -> bool:
        """Whether a condition that has arrived does not hold. Those that hold are forgotten."""
        while self._checks and (self._checks[0].arriving.is_done() or len(self._checks) > MAX_CHECKS):
            if not self._checks[0].is_met():
                return True
            self._unused.append(self._checks.popleft().holds)
        return False

    def settle(self) -> None:
        """Waits for all conditions, and raises where one does not hold. All ranks call it."""
        checks, self._checks = self._checks, deque()
        failed = [check for check in checks if not check.is_met()]  # waits for each: its memory may be given to others
        self._unused += [check.holds for check in checks]
        for check in failed:
            check.undo()
        for check in failed[:1]:
            check.refuse()
