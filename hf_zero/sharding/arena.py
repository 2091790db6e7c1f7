"""Memory for long-lived tensors, separate from that of short-lived ones (ZeRO-R M_D, arXiv 1910.02054 section 6.3).

Where the two come from one place, what stays lies between holes that later activations, of other lengths, do not fit.
What is filled again and again takes slots, which live as long as the engine: fresh memory costs page faults on CPUs.
"""

from bisect import insort
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import align


# Tensors begin at multiples of so many bytes, as `Slot.views` do.
ALIGN_NBYTES = 64


class Arena:
    """Contiguous memory from which tensors of one purpose are taken, and to which they are given back in any order.

    Who gives memory back has seen to it that nothing under way on another stream still uses it.

    An arena that keeps its memory has one stretch of what is expected, made when the first tensor is taken, and grows
    by further ones. An accelerator's allocator splits its blocks, so there the stretch comes from a pool of its own.
    In one that does not, a stretch is made for one tensor and goes with it: what takes turns with it (gradients grow
    while activations shrink) does not add up.

    Args:
        keeps (`bool`): whether memory stays when its tensors are given back.
        make (`Callable`, *optional*): gives memory, 1-D uint8, of so many bytes, instead of the device's allocator.
        chunk_nbytes (`int`): by how much it grows at least when more is taken than was expected.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        keeps: bool,
        make: Callable[[int], Tensor] | None = None,
        chunk_nbytes: int = 0,
    ):
        self.name = name
        self.device = device
        self.keeps = keeps
        self.peak_nbytes = 0  # most that was ever taken at once
        self._make = make or self._allocate
        self._chunk_nbytes = chunk_nbytes
        self._expected_nbytes = 0
        self._pool = None  # made with the first stretch, where the device's allocator has pools
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

    @property
    def largest_hole_nbytes(self) -> int:
        """The most bytes that can be taken at once without a new stretch."""
        holes = [hole for stretch in self._stretches.values() for hole in stretch.holes]
        return max((stop - start for start, stop in holes), default=0)

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that is not in the largest hole; 0 when nothing is free."""
        free = self.capacity_nbytes - self.used_nbytes
        return 1 - self.largest_hole_nbytes / free if free else 0.0

    def expect(self, numel: int, dtype: torch.dtype, count: int = 1) -> None:
        """Announces that `count` such tensors will be in use together, so that the next stretch has room for them."""
        self._expected_nbytes += count * _aligned(numel * dtype.itemsize)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Takes memory, 1-D, with arbitrary contents, from the first hole that is large enough."""
        nbytes = _aligned(numel * dtype.itemsize)
        found = self._hole(nbytes)
        if found is None:
            self._grow(nbytes)
            found = self._hole(nbytes)
            assert found is not None, "a new stretch holds what it was made for"
        key, start = found
        tensor = self._stretches[key].memory[start : start + numel * dtype.itemsize].view(dtype)
        self._taken[_place(tensor)] = key, nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Gives a tensor of `take` back. Its memory may be taken again at once. Raises [`LifecycleError`] when it is
        not taken from here, or given back already."""
        place = _place(tensor)
        if place not in self._taken:
            raise LifecycleError(
                f"arena {self.name!r}: {tensor.numel()} elements were given back that are not taken from it; give "
                "back once, and the very tensor that `take` returned"
            )
        key, nbytes = self._taken.pop(place)
        stretch = self._stretches.get(key)
        if stretch is None:
            return  # it was lent, and taken back
        start = place[1] - key[1]
        stretch.give(start, start + nbytes)
        if not self.keeps and stretch.is_free:
            del self._stretches[key]

    def lend(self, memory: Tensor) -> None:
        """Adds memory that is idle for a while, 1-D uint8: until `take_back`, or until all that was taken from it has
        been given back."""
        self._stretches[_place(memory)] = _Stretch(memory)

    def take_back(self, memory: Tensor) -> None:
        """Ends a loan. What was taken from it has to be given back before the memory is used again."""
        self._stretches.pop(_place(memory), None)

    def is_from(self, tensor: Tensor, memory: Tensor) -> bool:
        """Whether a tensor was taken from this memory."""
        taken = self._taken.get(_place(tensor))
        return taken is not None and taken[0] == _place(memory)

    def close(self) -> None:
        """Frees all memory. Tensors in use keep theirs as long as they live."""
        self._stretches.clear()
        self._taken.clear()
        self._pool = None

    def _hole(self, nbytes: int) -> tuple["_Place", int] | None:
        """Takes the first hole that is large enough, and returns its stretch and where it begins there."""
        for key, stretch in self._stretches.items():
            start = stretch.take(nbytes)
            if start is not None:
                return key, start
        return None

    def _grow(self, nbytes: int) -> None:
        if self.keeps:
            nbytes = max(nbytes, self._expected_nbytes - self.capacity_nbytes, self._chunk_nbytes)
        memory = self._make(nbytes)
        self._stretches[_place(memory)] = _Stretch(memory)

    def _allocate(self, nbytes: int) -> Tensor:
        backend = _backend_of(self.device)
        if self.keeps and self._pool is None and hasattr(backend, "MemPool"):
            self._pool = backend.MemPool()
        with nullcontext() if self._pool is None else backend.use_mem_pool(self._pool, self.device.index):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class Arenas(NamedTuple):
    """The arenas of one engine, one for each purpose."""

    gathered: Arena  # slots in which whole parameters appear
    collected: Arena  # slots in which backward collects gradients
    reduced: Arena  # gradients that are averaged over the ranks, between backward and step

    @classmethod
    def of(cls, comm: Comm) -> "Arenas":
        """Makes arenas on the ranks' device; where other ranks read them, in memory that they can read."""

        is_read = comm.shared_memory is not None  # other ranks have mapped it
        make = partial(comm.empty, dtype=torch.uint8) if is_read else None
        return cls(
            gathered=Arena("gathered", comm.device, keeps=not comm.is_on_cpu),
            collected=Arena("collected", comm.device, keeps=is_read, make=make),
            reduced=Arena("reduced", comm.device, keeps=False),
        )


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
    backend = _backend_of(device)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()


def _backend_of(device: torch.device) -> Any:
    """Returns torch's module for a device; `None` for the meta device."""
    return None if device.type == "meta" else torch.get_device_module(device)


class _Stretch:
    """One run of memory and its free ranges [start, stop), in order, no two of which touch."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.holes = [(0, memory.numel())]

    @property
    def is_free(self) -> bool:
        return self.holes == [(0, self.memory.numel())]

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


def _aligned(nbytes: int) -> int:
    return align(max(1, nbytes), ALIGN_NBYTES)
