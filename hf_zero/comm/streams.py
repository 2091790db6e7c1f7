"""Streams and events of one device.

`current_stream()`, `Stream()` and `Event.wait()` of a device module refer to the calling thread's
current device unless a device is passed. Every thread starts on device 0, whichever device the model is on, so the
package uses streams and events only through this class, which always passes the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Streams:
    """Creates streams and events of one device and issues work to its streams.

    For the CPU and the meta device these are the streams of `torch.cpu`, which do nothing. Other devices are accessed
    through `torch.Stream`, `torch.Event` and `torch.accelerator`, which also support out-of-tree backends.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # Other device modules need not have streams and events.
        self._cpu: Any = torch.get_device_module("cpu") if device.type in ("cpu", "meta") else None

    def new(self) -> Any:
        """Returns a new stream for copies and exchanges.

        It has a higher priority than the default stream: its kernels are small, later computation waits for them, and
        with equal priority they would queue behind large matrix products.
        """
        return torch.Stream(self.device, priority=-1) if self._cpu is None else self._cpu.Stream()

    def current(self) -> Any:
        """Returns the stream to which this thread currently issues work."""
        if self._cpu is not None:
            return self._cpu.current_stream(self.device)
        return torch.accelerator.current_stream(self.device)

    def event(self, *, is_timed: bool = False) -> Any:
        """Returns a new event that has not been recorded yet. On the CPU, events have no timing."""
        if self._cpu is not None:
            return self._cpu.Event()
        return torch.Event(self.device, enable_timing=is_timed)

    def record(self, stream: Any = None, *, is_timed: bool = False) -> Any:
        """Returns an event recorded on a stream, by default the current one."""
        event = self.event(is_timed=is_timed)
        event.record(self.current() if stream is None else stream)
        return event

    def wait(self, event: Any, *_held: Tensor) -> None:
        """Makes the current stream wait for an event, without blocking the host. A `partial` of this method with the
        tensors that the work before the event uses keeps their memory until then: the allocator would otherwise give
        it to the next work of the stream on which it was allocated."""
        event.wait(self.current())

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """A context in which this thread issues its work to `stream`."""
        if self._cpu is not None:
            with self._cpu.stream(stream):
                yield
            return
        # `with stream:` stores the stream to restore in the stream object, which several threads share
        index, before = torch.accelerator.current_device_index(), self.current()
        torch.accelerator.set_stream(stream)  # also sets the device
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    @contextmanager
    def behind(self, stream: Any) -> Iterator[None]:
        """Issues work inside the context to a stream, after the work already issued to the current stream."""
        stream.wait_stream(self.current())
        with self.on(stream):
            yield

    def issue(self, stream: Any, work: Callable[[], object], *held: Tensor) -> Callable[[], None]:
        """Calls a function that issues work to a stream, after the work already issued to the current stream.

        Returns:
            A function that makes the current stream wait for that work, and keeps the memory of `held` until then.
        """
        with self.behind(stream):
            work()
            done = self.record(stream)
        return partial(self.wait, done, *held)

    def set_device(self) -> None:
        """Makes the device the current one of this thread."""
        if self._cpu is None and self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        """Blocks the host until all work of the device is done."""
        if self._cpu is not None:
            self._cpu.synchronize()
        else:
            torch.accelerator.synchronize(self.device)


def free_and_total_nbytes(device: torch.device) -> tuple[int, int] | None:
    """Returns the free and the total memory of a device, or `None` if the backend does not report it."""
    backend = torch.get_device_module(device)
    try:
        return getattr(backend, "mem_get_info", torch.accelerator.get_memory_info)(device)
    except RuntimeError:
        return None
