"""Snapshots for saves in the background: copies of this rank's pieces, in memory that every save uses again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_zero.checkpoint.staging import StagedFiles


_CHUNK_NBYTES = 64 * 2**20
_ALIGNMENT = 64


class Snapshots:
    """Copies pieces of checkpoints, in the dtypes of their files, one checkpoint at a time.

    The memory is page-locked where pieces lie on a GPU, grows to the size of this rank's part of a checkpoint, and
    stays: fresh memory would cost more time than the copy.
    """

    def __init__(self):
        self._chunks: list[Tensor] = []
        self._next = 0  # the chunk that is being filled
        self._used = 0  # bytes of it

    def take(self, parts: Sequence[StagedFiles]) -> list[StagedFiles]:
        """Returns the same parts with their pieces copied. What was taken before is overwritten."""
        self._next = self._used = 0
        taken, on_gpu = [], False
        for part in parts:
            pieces = []
            for name, start, values in part.pieces():
                copy = self._place(values.numel(), part.files.entry(name).dtype, pinned=values.is_cuda)
                copy.copy_(values.detach(), non_blocking=True)
                on_gpu = on_gpu or values.is_cuda
                pieces.append((name, start, copy))
            taken.append(replace(part, pieces=partial(iter, pieces)))
        if on_gpu:
            torch.cuda.synchronize()
        return taken

    def _place(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        nbytes = numel * dtype.itemsize
        while self._next < len(self._chunks) and self._used + nbytes > len(self._chunks[self._next]):
            self._next, self._used = self._next + 1, 0
        if self._next == len(self._chunks):
            size = max(nbytes, _CHUNK_NBYTES)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        place = self._chunks[self._next][self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return place
