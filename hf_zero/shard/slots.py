"""Buffers that live as long as the engine and are filled again and again.

Fresh memory costs page faults on CPUs and fragments the allocator on GPUs (ZeRO-R M_D, arXiv 1910.02054 section 6.3).
"""

import torch
from torch import Tensor


class Slot:
    """One reused buffer. `holder` is whoever filled it last; its contents are the holder's until another takes it.

    Args:
        buffer (`Tensor`): 1-D uint8.
    """

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.memos: dict[object, object] = {}  # what a borrower keeps as long as there is the buffer
        self.holder: object | None = None  # None until it is first filled

    def views(self, parts: list[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Consecutive 1-D views.

        Args:
            parts (`list[tuple[int, torch.dtype]]`): number of elements and dtype of each, see `parts_nbytes`.
        """
        views, offset = [], 0
        for numel, dtype in parts:
            views.append(self.buffer[offset : offset + numel * dtype.itemsize].view(dtype))
            offset += _aligned(numel * dtype.itemsize)
        return views


def parts_nbytes(parts: list[tuple[int, torch.dtype]]) -> int:
    """Bytes that a slot needs to hold these parts."""
    return sum(_aligned(numel * dtype.itemsize) for numel, dtype in parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
