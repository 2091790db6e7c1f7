"""Reused buffers. What is filled again and again keeps its memory as long as the engine lives, apart from that of
short-lived tensors (ZeRO-R M_D, arXiv 1910.02054 section 6.3): fresh memory costs page faults on CPUs, and what stays
between holes that later activations do not fit fragments an accelerator's."""

from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.sharding.layout import align


# Tensors begin at multiples of so many bytes.
ALIGN_NBYTES = 64


class Holder(Protocol):
    """An object that fills a slot."""

    def evict(self) -> None:
        """Gives the slot up, because another holder is about to fill it."""


class Slot:
    """One reused buffer. Its contents belong to `holder`, which filled it last, until another holder takes it."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer  # 1-D uint8
        self.memos: dict[object, Any] = {}  # what a borrower keeps as long as there is the buffer
        self.holder: Holder | None = None  # None until it is first filled

    def views(self, parts: list[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Returns consecutive 1-D views of so many elements and that dtype each, see `parts_nbytes`."""
        views, offset = [], 0
        for numel, dtype in parts:
            views.append(self.buffer[offset : offset + numel * dtype.itemsize].view(dtype))
            offset += align(numel * dtype.itemsize, ALIGN_NBYTES)
        return views


def parts_nbytes(parts: list[tuple[int, torch.dtype]]) -> int:
    """Returns how many bytes a slot needs to hold these parts."""
    return sum(align(numel * dtype.itemsize, ALIGN_NBYTES) for numel, dtype in parts)


def trim(device: torch.device) -> None:
    """Returns freed memory from the allocator's cache to the device, so that long-lived tensors do not take blocks
    that activations need again."""
    backend: Any = None if device.type == "meta" else torch.get_device_module(device)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()
