"""Streams and events of one device.

`current_stream()`, `Stream()` and `Event.wait()` of CUDA's module and others mean the current device of the calling
thread unless they are given one. Every thread starts with device 0, whichever device the model is on, so the package
reaches streams and events only through this class, which always names the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """Makes streams and events of one device, and puts work on its streams.

    On the CPU, and for a plan on the meta device, they are those of `torch.cpu`, which do nothing. Other devices are
    reached through `torch.Stream`, `torch.Event` and `torch.accelerator`, which a backend outside of torch has, too.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # The module of another device need not have streams and events.
        self._cpu: Any = torch.get_device_module("cpu") if device.type in ("cpu", "meta") else None

    def new(self) -> Any:
        """Returns a new stream, for copies and exchanges.

        Its kernels go before those of the default stream: they are small, what computes waits for them later, and
        between equals they wait for room behind large matrix products.
        """
        return torch.Stream(self.device, priority=-1) if self._cpu is None else self._cpu.Stream()

    def current(self) -> Any:
        """Returns the stream of the device to which this thread issues work."""
        if self._cpu is not None:
            return self._cpu.current_stream(self.device)
        return torch.accelerator.current_stream(self.device)

    def event(self, *, is_timed: bool = False) -> Any:
        """Returns a new event, which is not recorded. On the CPU it cannot be timed."""
        if self._cpu is not None:
            return self._cpu.Event()
        return torch.Event(self.device, enable_timing=is_timed)

    def record(self, stream: Any = None, *, is_timed: bool = False) -> Any:
        """Returns an event behind the work that a stream has, by default the current one."""
        event = self.event(is_timed=is_timed)
        event.record(self.current() if stream is None else stream)
        return event

    def wait(self, event: Any) -> None:
        """Lets the current stream, and not the host, wait for an event."""
        event.wait(self.current())

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Issues the work of the context to a stream."""
        if self._cpu is not None:
            with self._cpu.stream(stream):
                yield
            return
        # `with stream:` keeps what it restores in the stream object, which several threads share
        index, before = torch.accelerator.current_device_index(), self.current()
        torch.accelerator.set_stream(stream)  # and its device
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    @contextmanager
    def behind(self, stream: Any) -> Iterator[None]:
        """Issues the work of the context to a stream, after the work that the current stream has so far."""
        stream.wait_stream(self.current())
        with self.on(stream):
            yield

    def set_device(self) -> None:
        """Makes the device this thread's current one."""
        if self._cpu is None and self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        """Lets the host wait for all work of the device."""
        if self._cpu is not None:
            self._cpu.synchronize()
        else:
            torch.accelerator.synchronize(self.device)


def free_and_total_nbytes(device: torch.device) -> tuple[int, int] | None:
    """Returns a device's free memory and all its memory; `None` where the backend cannot tell."""
    backend = torch.get_device_module(device)
    try:
        return getattr(backend, "mem_get_info", torch.accelerator.get_memory_info)(device)
    except RuntimeError:
        return None
