"""Where the values of one flat buffer rest between uses, and how they become whole: one class for each kind of rest.

| kind | whole compute copy | masters | where |
|---|---|---|---|
| `ReplicatedRest` | rests on each rank | a range of it | stages 0 to 2 |
| `ReplicatedCopyRest` | rests on each rank | a tensor of more precision, or off the device | stages 0 to 2 |
| `SharedRest` | none, or the masters of all ranks | in memory that all ranks of the host read | stage 3 on CPUs |
| `ShardedRest` | none: gathered from the masters | this rank's range, on the device, the host or disk | stage 3 |
| `ShardedCopyRest` | none: gathered from a shard of it | elsewhere or of another dtype | stage 3, offloaded |
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending
from hf_zero.comm.blockwise import PackedGather
from hf_zero.config import MemoryTier, Residency
from hf_zero.engine.resting_shards import SHARDS, DeviceShard, HostTransfer
from hf_zero.sharding.layout import Layout, Range
from hf_zero.sharding.placement import Placement


def copy_overlap(memory: Tensor, covers: Range, values: Tensor, what: Range) -> None:
    """Copies the overlap of two ranges of a buffer from `values` (the range `what`) into `memory` (the range
    `covers`)."""
    low, high = max(covers[0], what[0]), min(covers[1], what[1])
    if low < high:
        memory[low - covers[0] : high - covers[0]].copy_(values[low - what[0] : high - what[0]])


PART_NUMEL = 2**23  # of what is compared, so many elements are in memory once more


class Rest:
    """The place where the values of one flat buffer rest on this rank. The subclasses are the five kinds. Masters are
    what the optimizer updates on this rank, a compute shard its range of the compute copy, where that rests."""

    is_sharded = True  # the whole values appear only while they are used
    has_copy = False  # a compute copy rests beside the masters, and follows them
    whole: Tensor | None = None  # the whole compute copy, where it is at hand without a gather
    refreshing: Pending | None = None  # the compute copy is being made to follow the masters already
    packing: PackedGather | None = None  # gathers the values in few bits; None: as they are

    def __init__(
        self, masters: DeviceShard, compute_shard: DeviceShard | None, numel: int, comm: Comm, dtype: torch.dtype
    ):
        self.masters = masters
        self.compute_shard = compute_shard
        # what all-gathers take; None where the whole values rest on each rank
        self.source = (compute_shard or masters) if self.is_sharded else None
        self._numel = numel
        self._holds_all = masters.numel == numel
        self._comm = comm
        self._dtype = dtype

    def allocate(self) -> None:
        """Allocates the memory in which whole values rest on this rank, or are shared by all."""

    def allocate_masters(self) -> None:
        """Allocates the memory of the masters, which is filled through `at_rest`."""
        self.masters.allocate()

    def at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """Yields all memory in which values rest, to be written, with the range of each; see `masters.pieces`."""
        yield from self.masters.pieces(writes=True, only=only)

    def take(self, values: Tensor, start: int, ranges: list[Range]) -> None:
        """Copies values of rank 0 into the memory in which they rest. `values`: 1-D, of the masters' dtype,
        overwritten by rank 0's; `start`, `ranges`: where they begin in the buffer, and which to take, counted
        there."""
        self._comm.broadcast_(values)
        for memory, covers in self.at_rest((start, start + values.numel())):
            for each in ranges:
                copy_overlap(memory, covers, values[each[0] - start : each[1] - start], each)

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None = None, *, exact: bool = False) -> Pending:
        """Gathers the whole values into `full` from the ranges of all ranks. `arriving`: of this rank's range, which
        is on its way there from the disk; `exact`: in all their bits, also where others are gathered in few."""
        is_exact = exact or self.packing is None
        gather = self._comm.shard_group.all_gather if is_exact else self.packing.all_gather
        return self.source.all_gather(full, what, arriving, gather)

    def round_(self, full: Tensor) -> None:
        """Rounds whole values as a gather does."""
        if self.packing is not None:
            self.packing.round_(full)

    def barrier(self) -> None:
        """Waits for all ranks, where they read one another's masters."""

    def refresh(self) -> Pending:
        """Copies the masters to the compute copy of their range, unless `begin_refresh` has begun that."""
        refreshing, self.refreshing = self.refreshing, None
        return self._send_all() if refreshing is None else refreshing

    def begin_refresh(self) -> None:
        """Begins the copies that the next `refresh` returns."""
        self.refreshing = self._send_all()

    def _send_all(self) -> Pending:
        last = Pending()
        for values, covers in self.masters.pieces(writes=False) if self.has_copy else ():
            last = self.send(values, covers)
            if self.masters.tier is MemoryTier.DISK:
                self.masters.transfer.bus.synchronize()  # the next piece may come into its memory
        return last

    def send(self, values: Tensor, covers: Range) -> Pending:
        """Copies masters of a range to the compute copy, where there is one beside the masters. `values`: the masters
        there, to be overwritten after a `Bus.synchronize`."""
        return Pending()

    def follow_written(self, full: Tensor) -> None:
        """Updates the masters of elements that user code wrote; the others keep theirs, as the copy may be rounded."""
        for masters, covers in self.masters.pieces(writes=True):
            copies = full[slice(*covers)].to(masters.device)
            for master, values in zip(masters.split(PART_NUMEL), copies.split(PART_NUMEL)):
                master.copy_(torch.where(values != master.to(values.dtype), values.to(master.dtype), master))

    def release(self) -> None:
        """Frees all memory."""
        self.whole = self.compute_shard = self.source = self.masters.values = self.masters.on_disk = None

    def whole_master(self, what: str) -> Tensor:
        """Returns the masters of the whole buffer, on every rank; to be read only."""
        if self._holds_all and self.masters.tier is not MemoryTier.DISK:
            return self.masters.values
        whole = torch.empty(self._numel, dtype=self.masters.dtype, device=self._comm.device)
        for master, (start, stop) in self.masters.pieces(writes=False):
            whole[start:stop].copy_(master)
        if not self._holds_all:
            self._comm.shard_group.all_gather(whole, whole[slice(*self.masters.covers)], what=what).wait()
        return whole


class _Whole(Rest):
    is_sharded = False

    def allocate(self) -> None:
        self.whole = self._comm.shard_group.empty(self._numel, self._dtype)

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None = None, *, exact: bool = False) -> Pending:
        if self._holds_all:
            return Pending()
        return self._comm.shard_group.all_gather(full, full[slice(*self.masters.covers)], what=what)


class ReplicatedRest(_Whole):
    """The whole compute copy rests on each rank, and the masters are a range of it."""

    def allocate_masters(self) -> None:
        self.masters.values = self.whole.zero_()[slice(*self.masters.covers)]

    def at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        yield self.whole, (0, self._numel)

    def follow_written(self, full: Tensor) -> None:
        """Does nothing, since the values are the masters."""

    def whole_master(self, what: str) -> Tensor:
        return self.whole


class ReplicatedCopyRest(_Whole):
    """The whole compute copy rests on each rank; the masters are of more precision, or lie elsewhere."""

    has_copy = True

    def allocate_masters(self) -> None:
        self.masters.allocate()
        self.whole.zero_()

    def at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        yield from super().at_rest(only)
        yield self.whole, (0, self._numel)

    def send(self, values: Tensor, covers: Range) -> Pending:
        return self.masters.copy_to(self.whole[slice(*covers)], values)


class SharedRest(Rest):
    """The masters of all ranks lie in memory that all of them read: whole values are at hand, unless they are cast."""

    _common: Tensor

    def allocate(self) -> None:
        self._common = self._comm.shard_group.shared_memory.common(self._numel, self.masters.dtype)
        self.masters.values = self._common[slice(*self.masters.covers)]
        if self.masters.dtype is self._dtype:
            self.whole = self._common

    def allocate_masters(self) -> None:
        """Does nothing, since `allocate` has allocated the memory."""

    def take(self, values: Tensor, start: int, ranges: list[Range]) -> None:
        if self._comm.shard_group.rank == 0:
            if self._comm.replicate_group is not None:
                self._comm.replicate_group.broadcast_(values)
            for each in ranges:
                copy_overlap(self._common, (0, self._numel), values[each[0] - start : each[1] - start], each)

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None = None, *, exact: bool = False) -> Pending:
        if full is not self._common:
            self._comm.shard_group.shared_memory.read(full, self._common, what=what)
        return Pending()

    def barrier(self) -> None:
        self._comm.shard_group.shared_memory.barrier()

    def whole_master(self, what: str) -> Tensor:
        return self._common

    def release(self) -> None:
        super().release()
        self._common = None


class ShardedRest(Rest):
    """Each rank holds the masters of its range, from which the whole values are gathered."""


class ShardedCopyRest(ShardedRest):
    """Each rank holds its range of the masters and of the compute copy, from which the whole values are gathered. The
    masters are elsewhere, of another dtype, or changing meanwhile."""

    has_copy = True

    def send(self, values: Tensor, covers: Range) -> Pending:
        return self.compute_shard.write(values, covers)

    def follow_written(self, full: Tensor) -> None:
        super().follow_written(full)
        self.refresh().wait()


def rest_of(
    layout: Layout, placement: Placement, comm: Comm, transfer: HostTransfer, packing: PackedGather | None = None
) -> Rest:
    """Makes what holds the values of a buffer. `packing` gathers them in few bits: ranks that could read them in one
    memory then gather too, so that they compute with the same values as ranks of several hosts."""
    is_whole = placement.masters is Residency.REPLICATED
    covers = (0, layout.full_numel) if is_whole else layout.owned(comm.shard_group.rank)
    dtype, master_dtype = placement.dtype, placement.master_dtype
    # the device takes and gives values of its own dtype alone
    masters = SHARDS[placement.masters_at](covers, master_dtype, comm, transfer, locked=master_dtype is dtype)
    compute_shard = None
    kind: type[Rest]
    if placement.values is not Residency.SHARDED:
        kind = ReplicatedCopyRest if placement.has_copy else ReplicatedRest
    elif placement.has_copy:
        kind = ShardedCopyRest
        compute_shard = SHARDS[placement.values_at](covers, dtype, comm, transfer, locked=True)
    else:
        is_read = placement.masters_at is MemoryTier.DEVICE and comm.shard_group.shared_memory is not None
        kind = SharedRest if is_read and packing is None else ShardedRest
    rest = kind(masters, compute_shard, layout.full_numel, comm, dtype)
    if rest.is_sharded:
        rest.packing = packing
    return rest
