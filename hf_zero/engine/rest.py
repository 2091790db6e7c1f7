"""Where the values of a flat buffer are stored between uses, and how they are gathered: one class per kind of storage.

| class | full compute copy | masters | used at |
|---|---|---|---|
| `ReplicatedRest` | on each rank | a view of its range of the compute copy | stages 0 to 2 |
| `ReplicatedCopyRest` | on each rank | a separate tensor, more precise or offloaded | stages 0 to 2 |
| `SharedRest` | the masters of all ranks, or gathered if it is cast | in shared memory | stage 3 on CPUs |
| `ShardedRest` | gathered from the masters | this rank's range on device, host or disk | stage 3 |
| `ShardedCopyRest` | gathered from its shards | in other memory or another dtype | stage 3 with offload |
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
    """Copies the overlap of two ranges of a buffer from `values` (which covers `what`) into `memory` (which covers
    `covers`)."""
    low, high = max(covers[0], what[0]), min(covers[1], what[1])
    if low < high:
        memory[low - covers[0] : high - covers[0]].copy_(values[low - what[0] : high - what[0]])


PART_NUMEL = 2**23  # elements per chunk of a comparison; one chunk is copied at a time


class Rest:
    """The stored values of a flat buffer on this rank; the base class of the five kinds.

    `masters` holds the values that the optimizer updates on this rank, and `compute_shard` this rank's range of the
    compute copy if that is stored too."""

    is_sharded = True  # the full values exist only while they are gathered
    has_copy = False  # a compute copy is stored in addition to the masters and follows them
    whole: Tensor | None = None  # the full compute copy if it is available without a gather
    refreshing: Pending | None = None  # an update of the compute copy that has begun
    packing: PackedGather | None = None  # 8-bit gathers; None: gathers send the values unchanged

    def __init__(
        self, masters: DeviceShard, compute_shard: DeviceShard | None, numel: int, comm: Comm, dtype: torch.dtype
    ):
        self.masters = masters
        self.compute_shard = compute_shard
        # the shard that all-gathers send; None if each rank keeps the full values
        self.source = (compute_shard or masters) if self.is_sharded else None
        self._numel = numel
        self._holds_all = masters.numel == numel
        self._comm = comm
        self._dtype = dtype

    def allocate(self) -> None:
        """Allocates the memory of the full values, if this rank keeps them or all ranks share them."""

    def allocate_masters(self) -> None:
        """Allocates the memory of the masters. `at_rest` yields it to be filled."""
        self.masters.allocate()

    def at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """Yields all memory that stores values, for writing, each with its range; see `DeviceShard.pieces`."""
        yield from self.masters.pieces(writes=True, only=only)

    def take(self, values: Tensor, start: int, ranges: list[Range]) -> None:
        """Broadcasts values of rank 0 and stores them.

        Args:
            values (`Tensor`): 1-D, in the dtype of the masters; on other ranks overwritten with those of rank 0.
            start (`int`): the position in the buffer where `values` begin.
            ranges (`list[Range]`): the ranges of the buffer to store.
        """
        self._comm.broadcast_(values)
        for memory, covers in self.at_rest((start, start + values.numel())):
            for each in ranges:
                copy_overlap(memory, covers, values[each[0] - start : each[1] - start], each)

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None = None, *, exact: bool = False) -> Pending:
        """Gathers the values of all ranks into `full`.

        Args:
            full (`Tensor`): the memory of the full buffer.
            what (`str`): a name for error messages.
            arriving (`Pending`, *optional*): a pending copy of this rank's range from disk into `full`.
            exact (`bool`): do not quantize, even if gathers are in 8 bits.
        """
        is_exact = exact or self.packing is None
        gather = self._comm.shard_group.all_gather if is_exact else self.packing.all_gather
        return self.source.all_gather(full, what, arriving, gather)

    def round_(self, full: Tensor) -> None:
        """Rounds full values as an 8-bit gather does."""
        if self.packing is not None:
            self.packing.round_(full)

    def barrier(self) -> None:
        """Waits for all ranks if they read each other's masters."""

    def refresh(self) -> Pending:
        """Copies the masters to their range of the compute copy. If `begin_refresh` has started that, returns its
        copies."""
        refreshing, self.refreshing = self.refreshing, None
        return self._send_all() if refreshing is None else refreshing

    def begin_refresh(self) -> None:
        """Starts the copies that the next `refresh` returns."""
        self.refreshing = self._send_all()

    def _send_all(self) -> Pending:
        last = Pending()
        for values, covers in self.masters.pieces(writes=False) if self.has_copy else ():
            last = self.send(values, covers)
            if self.masters.tier is MemoryTier.DISK:
                self.masters.transfer.bus.synchronize()  # the next piece may reuse this memory
        return last

    def send(self, values: Tensor, covers: Range) -> Pending:
        """Copies a range of the masters to the compute copy, if there is a separate one. `values` may be overwritten
        after `Bus.synchronize`."""
        return Pending()

    def follow_written(self, full: Tensor) -> None:
        """Updates the masters of elements that user code wrote. Other masters keep their values, because the compute
        copy may be rounded."""
        for masters, covers in self.masters.pieces(writes=True):
            copies = full[slice(*covers)].to(masters.device)
            for master, values in zip(masters.split(PART_NUMEL), copies.split(PART_NUMEL)):
                master.copy_(torch.where(values != master.to(values.dtype), values.to(master.dtype), master))

    def release(self) -> None:
        """Frees all memory."""
        self.whole = self.compute_shard = self.source = self.masters.values = self.masters.on_disk = None

    def whole_master(self, what: str) -> Tensor:
        """Returns the masters of the full buffer on every rank. They are read-only."""
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
    """Each rank keeps the full compute copy, and the masters are a view of it."""

    def allocate_masters(self) -> None:
        self.masters.values = self.whole.zero_()[slice(*self.masters.covers)]

    def at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        yield self.whole, (0, self._numel)

    def follow_written(self, full: Tensor) -> None:
        """Does nothing: user code wrote to the masters themselves."""

    def whole_master(self, what: str) -> Tensor:
        return self.whole


class ReplicatedCopyRest(_Whole):
    """Each rank keeps the full compute copy. The masters are more precise or in other memory."""

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
    """The masters of all ranks are in shared memory. Modules use them in place, unless they are cast."""

    _common: Tensor

    def allocate(self) -> None:
        self._common = self._comm.shard_group.shared_memory.common(self._numel, self.masters.dtype)
        self.masters.values = self._common[slice(*self.masters.covers)]
        if self.masters.dtype is self._dtype:
            self.whole = self._common

    def allocate_masters(self) -> None:
        """Does nothing: `allocate` has allocated the memory."""

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
    """Each rank holds the masters of its range, and gathers read them."""


class ShardedCopyRest(ShardedRest):
    """Each rank holds its range of the masters and of the compute copy, and gathers read the compute copy. The masters
    are in other memory, have another dtype, or may be updated during a gather."""

    has_copy = True

    def send(self, values: Tensor, covers: Range) -> Pending:
        return self.compute_shard.write(values, covers)

    def follow_written(self, full: Tensor) -> None:
        super().follow_written(full)
        self.refresh().wait()


def rest_of(
    layout: Layout, placement: Placement, comm: Comm, transfer: HostTransfer, packing: PackedGather | None = None
) -> Rest:
    """Returns the `Rest` of a flat buffer. With `packing`, ranks gather even if they could share memory, so that they
    compute with the same rounded values as ranks on several hosts."""
    is_whole = placement.masters is Residency.REPLICATED
    covers = (0, layout.full_numel) if is_whole else layout.owned(comm.shard_group.rank)
    dtype, master_dtype = placement.dtype, placement.master_dtype
    # a device copies directly to and from locked memory only if the dtypes are equal
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
