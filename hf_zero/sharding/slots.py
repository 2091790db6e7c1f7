"""Buffers that live as long as the engine and are filled again and again.

Fresh memory costs page faults on CPUs and fragments the allocator on GPUs (ZeRO-R M_D, arXiv 1910.02054 section 6.3).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.comm import Pending
from hf_zero.sharding.arena import ALIGN_NBYTES
from hf_zero.sharding.layout import align


class Holder(Protocol):
    """Who fills a buffer."""

    def evict(self) -> None:
        """Called when another is about to fill it."""


class Slot:
    """One reused buffer. `holder` is whoever filled it last; its contents are the holder's until another takes it.

    Args:
        buffer (`Tensor`): 1-D uint8.
    """

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.memos: dict[object, Any] = {}  # what a borrower keeps as long as there is the buffer
        self.holder: Holder | None = None  # None until it is first filled

    def views(self, parts: list[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Consecutive 1-D views.

        Args:
            parts (`list[tuple[int, torch.dtype]]`): number of elements and dtype of each, see `parts_nbytes`.
        """
        views, offset = [], 0
        for numel, dtype in parts:
            views.append(self.buffer[offset : offset + numel * dtype.itemsize].view(dtype))
            offset += align(numel * dtype.itemsize, ALIGN_NBYTES)
        return views


class Ring:
    """A few buffers that are filled in turn. Taking one waits until its last use is over.

    Args:
        make (`Callable`): gives memory, 1-D uint8, of so many bytes.
        num_buffers (`int`): how many there are at most.
    """

    def __init__(self, make: Callable[[int], Tensor], num_buffers: int):
        self._make = make
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._uses: list[Pending | None] = [None] * num_buffers
        self._last = -1

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next buffer's first elements, 1-D; a buffer that is too small is made anew."""
        self._last = (self._last + 1) % len(self._buffers)
        use, self._uses[self._last] = self._uses[self._last], None
        if use is not None:
            use.wait()
        nbytes, buffer = numel * dtype.itemsize, self._buffers[self._last]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[self._last] = None  # given back before the larger one is made
            buffer = self._buffers[self._last] = self._make(nbytes)
        return buffer[:nbytes].view(dtype)

    def hold(self, use: Pending) -> None:
        """Tells what the buffer that was taken last is used for."""
        self._uses[self._last] = use


def parts_nbytes(parts: list[tuple[int, torch.dtype]]) -> int:
    """Bytes that a slot needs to hold these parts."""
    return sum(align(numel * dtype.itemsize, ALIGN_NBYTES) for numel, dtype in parts)
