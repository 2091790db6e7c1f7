"""Host memory for activations that is reused in every step (ZeRO-R M_D, arXiv 1910.02054 section 6.3)."""

from bisect import insort
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import align
from hf_zero.sharding.slots import ALIGN_NBYTES


class Arena:
    """A memory pool: tensors are allocated with `take` and freed with `give` in any order. It grows and never shrinks.

    Args:
        make (`Callable`): Allocates a 1-D uint8 tensor of the given number of bytes.
        chunk_nbytes (`int`): Minimum number of bytes by which the pool grows.
    """

    def __init__(self, make: Callable[[int], Tensor], chunk_nbytes: int = 0):
        self._make = make
        self._chunk_nbytes = chunk_nbytes
        self._stretches: dict[_Place, _Stretch] = {}  # by start
        self._taken: dict[_Place, tuple[_Place, int]] = {}  # stretch and bytes of each allocated tensor

    @property
    def capacity_nbytes(self) -> int:
        """The total bytes of the pool."""
        return sum(stretch.memory.numel() for stretch in self._stretches.values())

    @property
    def used_nbytes(self) -> int:
        """The allocated bytes, including alignment."""
        return sum(nbytes for _, nbytes in self._taken.values())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates an uninitialized 1-D tensor in the first hole that is large enough."""
        nbytes = align(max(1, numel * dtype.itemsize), ALIGN_NBYTES)
        found = self._hole(nbytes)
        if found is None:
            memory = self._make(max(nbytes, self._chunk_nbytes))
            self._stretches[_place(memory)] = _Stretch(memory)
            found = self._hole(nbytes)
            assert found is not None, "a new stretch is large enough"
        key, start = found
        tensor = self._stretches[key].memory[start : start + numel * dtype.itemsize].view(dtype)
        self._taken[_place(tensor)] = key, nbytes
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Frees a tensor of `take`, whose memory may be reused immediately. Raises [`LifecycleError`] if it was not
        allocated here or is already freed."""
        place = _place(tensor)
        if place not in self._taken:
            raise LifecycleError(
                f"arena: cannot free {tensor.numel()} elements that are not allocated from it; free each tensor "
                "of `take` once"
            )
        key, nbytes = self._taken.pop(place)
        start = place[1] - key[1]
        self._stretches[key].give(start, start + nbytes)

    def _hole(self, nbytes: int) -> tuple["_Place", int] | None:
        """Allocates in the first hole that is large enough, and returns its stretch and the start in it."""
        for key, stretch in self._stretches.items():
            start = stretch.take(nbytes)
            if start is not None:
                return key, start
        return None


class _Stretch:
    """One block of memory and its free ranges [start, stop), sorted and not adjacent."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.holes = [(0, memory.numel())]

    def take(self, nbytes: int) -> int | None:
        """Allocates at the start of the first hole that is large enough, and returns the first byte."""
        for index, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        before = next((hole for hole in self.holes if hole[1] == start), None)
        after = next((hole for hole in self.holes if hole[0] == stop), None)
        for hole in (before, after):
            if hole is not None:
                self.holes.remove(hole)
        insort(self.holes, (before[0] if before else start, after[1] if after else stop))


_Place = tuple[int, int]  # a storage and a byte offset in it


def _place(tensor: Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
