"""Host memory for activations, kept from step to step (ZeRO-R M_D, arXiv 1910.02054 section 6.3)."""

from bisect import insort
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import align
from hf_zero.sharding.slots import ALIGN_NBYTES


class Arena:
    """Memory from which tensors are taken, and to which they are given back in any order. It grows, and never shrinks.

    Args:
        make (`Callable`): gives memory, 1-D uint8, of so many bytes.
        chunk_nbytes (`int`): by how much it grows at least.
    """

    def __init__(self, make: Callable[[int], Tensor], chunk_nbytes: int = 0):
        self._make = make
        self._chunk_nbytes = chunk_nbytes
        self._stretches: dict[_Place, _Stretch] = {}  # by where they begin
        self._taken: dict[_Place, tuple[_Place, int]] = {}  # of each tensor: its stretch, and the bytes

    @property
    def capacity_nbytes(self) -> int:
        """The bytes of all stretches."""
        return sum(stretch.memory.numel() for stretch in self._stretches.values())

    @property
    def used_nbytes(self) -> int:
        """The bytes that are taken, with gaps of alignment."""
        return sum(nbytes for _, nbytes in self._taken.values())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Takes memory, 1-D, with arbitrary contents, from the first hole that is large enough."""
        nbytes = align(max(1, numel * dtype.itemsize), ALIGN_NBYTES)
        found = self._hole(nbytes)
        if found is None:
            memory = self._make(max(nbytes, self._chunk_nbytes))
            self._stretches[_place(memory)] = _Stretch(memory)
            found = self._hole(nbytes)
            assert found is not None, "a new stretch holds what it was made for"
        key, start = found
        tensor = self._stretches[key].memory[start : start + numel * dtype.itemsize].view(dtype)
        self._taken[_place(tensor)] = key, nbytes
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Gives a tensor of `take` back. Its memory may be taken again at once. Raises [`LifecycleError`] when it is
        not taken from here, or given back already."""
        place = _place(tensor)
        if place not in self._taken:
            raise LifecycleError(
                f"arena: {tensor.numel()} elements were given back that are not taken from it; give back once, and "
                "the very tensor that `take` returned"
            )
        key, nbytes = self._taken.pop(place)
        start = place[1] - key[1]
        self._stretches[key].give(start, start + nbytes)

    def _hole(self, nbytes: int) -> tuple["_Place", int] | None:
        """Takes the first hole that is large enough, and returns its stretch and where it begins there."""
        for key, stretch in self._stretches.items():
            start = stretch.take(nbytes)
            if start is not None:
                return key, start
        return None


class _Stretch:
    """One run of memory and its free ranges [start, stop), in order, no two of which touch."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.holes = [(0, memory.numel())]

    def take(self, nbytes: int) -> int | None:
        """Returns the first byte of the first hole that is large enough, which becomes smaller."""
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


_Place = tuple[int, int]  # a storage, and a byte of it


def _place(tensor: Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
