"""Reused buffers. Buffers that are filled repeatedly keep their memory for the lifetime of the engine, separate from
short-lived tensors (ZeRO-R M_D, arXiv 1910.02054 section 6.3): fresh memory causes page faults on CPUs, and long-lived
tensors between short-lived ones fragment the memory of accelerators."""

from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.sharding.layout import align


# Tensors start at multiples of this.
ALIGN_NBYTES = 64


class Holder(Protocol):
    """An object that fills a slot."""

    def evict(self) -> None:
        """Releases the slot before another holder fills it."""


class Slot:
    """A reused buffer. Its contents belong to `holder`, which filled it last, until another holder takes it."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer  # 1-D uint8
        self.holder: Holder | None = None  # None until the first use

    def views(self, parts: list[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Returns consecutive 1-D views with the given numbers of elements and dtypes. `parts_nbytes` gives their
        total size."""
        views, offset = [], 0
        for numel, dtype in parts:
            views.append(self.buffer[offset : offset + numel * dtype.itemsize].view(dtype))
            offset += align(numel * dtype.itemsize, ALIGN_NBYTES)
        return views


def parts_nbytes(parts: list[tuple[int, torch.dtype]]) -> int:
    """Returns the size of a slot that holds these parts."""
    return sum(align(numel * dtype.itemsize, ALIGN_NBYTES) for numel, dtype in parts)


def trim(device: torch.device) -> None:
    """Returns cached memory of the allocator to the device, so that long-lived tensors do not take blocks that
    activations will need again."""
    backend: Any = None if device.type == "meta" else torch.get_device_module(device)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()
