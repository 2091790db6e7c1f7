"""Flat buffers: the parameters of one unit with the same dtype and trainability, partitioned over the ranks.

Its `Placement` says where the values of a flat buffer are stored between uses, and so which values a gather reads:

| values | masters | between uses | a gather reads |
|---|---|---|---|
| replicated | same dtype and memory | `whole`; the masters are a view of its owned range | the owned ranges |
| replicated | other dtype or memory | `whole` and `masters`, from which `refresh` updates `whole` | the owned ranges |
| sharded | on CPUs that share memory | `masters`, in memory that all ranks map | that memory, or nothing if not cast |
| sharded | on the device | `masters` | `masters`, which are cast |
| sharded | offloaded, dtype or memory differ | `masters`, and `compute_shard` refreshed from it | `compute_shard` |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hf_zero.comm import Comm, Pending
from hf_zero.comm.base import DONE
from hf_zero.comm.blockwise import Packed
from hf_zero.config import MemoryTier, Residency
from hf_zero.engine.away import Placeholders, hide, show
from hf_zero.engine.divided import is_divided, local_of, put
from hf_zero.engine.opaque import companions_of
from hf_zero.engine.shard import HostTransfer, Shard
from hf_zero.engine.source import can_give, give_data, source_of
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import Layout, Range, Sample
from hf_zero.sharding.placement import Placement


# Rank 0's values are broadcast, and written values compared, in chunks of this many elements. Each is in memory twice.
CHUNK_NUMEL = 2**23


@dataclass(frozen=True)
class ParamInfo:
    """The facts of a parameter that are known without its data."""

    name: str  # the first name in `model.named_parameters()`
    shape: torch.Size  # the local shape if the parameter is partitioned by tensor parallelism
    save_dtype: torch.dtype  # the dtype when the model was sharded; the parameter is saved in it
    trainable: bool


@dataclass(frozen=True)
class NamedShard:
    """The range of a parameter (or of a tensor that belongs to it) that this rank holds."""

    name: str  # of the parameter
    shape: torch.Size  # of the full parameter or tensor
    start: int  # first element of the range in the flattened parameter or tensor
    tensor: Tensor  # 1-D view of the range; writing to it changes the sharded values


class Flat:
    """A flat buffer: its layout and parameters, this rank's values, and the memory of the gathered values.

    `masters` are the values that the optimizer updates on this rank, `compute_shard` is this rank's range of the
    compute copy if that is stored too, and `whole` is the full compute copy if it needs no gather.

    Args:
        infos (`list[ParamInfo]`): facts about the parameters, in the order of the layout.
        params (`list[nn.Parameter]`): the parameters, in the same order.
        packing (`Packed`, *optional*): 8-bit gathers. Ranks then gather even if they could share memory, so that
            they compute with the same rounded values as ranks on several hosts. `None`: values are sent unchanged.
    """

    full: Tensor  # the full compute copy; valid while the unit is gathered
    views: list[Tensor]  # views of `full`, one per parameter, in its shape
    shown: list[Tensor]  # the tensors that the parameters' `data` was last set to
    whole: Tensor | None = None  # the full compute copy if it is available without a gather
    refreshing: Pending | None = None  # an update of the compute copy that has begun
    # checksum of a sample of the compute copy when last updated, see `guards`; None: unknown, or no replicated copy
    bits: Tensor | None = None
    versions: list[int]  # version counters of the parameters after the engine's last write
    is_outdated = False  # whether the version counters are incremented, see `outdate_views`
    _common: Tensor | None = None  # the masters of all ranks, in shared memory

    def __init__(
        self,
        infos: list[ParamInfo],
        params: list[nn.Parameter],
        layout: Layout,
        *,
        placement: Placement,
        comm: Comm,
        transfer: HostTransfer,
        placeholders: Placeholders,
        packing: Packed | None = None,
    ):
        self.infos = infos
        self.params = params
        self.layout = layout
        self.placement = placement
        self.comm = comm
        self.dtype = placement.dtype
        self.trainable = placement.trainable
        self.is_divided = is_divided(params[0])  # by tensor parallelism: all parameters of a buffer are, or none
        self.owned = layout.owned(comm.shard_group.rank)
        # the range of `owned` that only this rank measures and saves
        self.part = layout.part(comm.shard_group.rank, comm.replica)
        self.placeholders = [placeholders.of(info.shape, self.dtype) for info in infos]
        self.cast: torch.dtype | None = None  # dtype inside `ShardedModel.computing_in`; None: `self.dtype`
        self.is_read = [source_of(p) is not None for p in params]  # which parameters are read from a `Source`
        self._home_dtypes = [p.dtype for p in params]
        self._companions = companions_of(params)

        self.is_sharded = placement.values is Residency.SHARDED  # the full values exist only while they are gathered
        self.has_copy = placement.has_copy  # a compute copy is stored in addition to the masters and follows them
        self.packing = packing if self.is_sharded else None
        reads_masters = self.is_sharded and not self.has_copy
        self.is_common = (  # the ranks read one another's masters
            reads_masters
            and packing is None
            and placement.masters_at is MemoryTier.DEVICE
            and comm.shard_group.shared_memory is not None
        )
        covers = (0, layout.full_numel) if placement.masters is Residency.REPLICATED else self.owned
        self.masters = Shard(covers, placement.master_dtype, placement.masters_at, comm, transfer)
        # a device copies directly to and from locked memory only if the dtypes are equal
        self.masters.is_locked = placement.master_dtype is self.dtype
        self.compute_shard: Shard | None = None
        if self.is_sharded and self.has_copy:
            self.compute_shard = Shard(covers, self.dtype, placement.values_at, comm, transfer)
        # the shard that gathers send; None if each rank keeps the full values
        self.source = (self.compute_shard or self.masters) if self.is_sharded else None

    @property
    def slot_part(self) -> tuple[int, torch.dtype]:
        """Number of elements and dtype of the full buffer in a slot, see `Slot.views`."""
        return self.layout.full_numel, self.dtype

    @property
    def scales(self) -> list[Tensor]:
        """Tensors that opaque parameters carry besides their data. They are replicated on every rank."""
        return [tensor for companions in self._companions for tensor in companions.scales]

    # Building

    def allocate(self) -> None:
        """Allocates the memory of the full values, if this rank keeps them or all ranks share them."""
        numel, group = self.layout.full_numel, self.comm.shard_group
        if self.is_common:
            self._common = group.shared_memory.common(numel, self.masters.dtype)
            self.masters.values = self._common[slice(*self.masters.covers)]
            self.whole = self._common if self.masters.dtype is self.dtype else None
        elif not self.is_sharded:
            self.whole = group.empty(numel, self.dtype)
        if self.whole is not None:
            self.bind(self.whole)

    def _allocate_masters(self) -> None:
        if self.is_common:
            return
        if self.is_sharded or self.has_copy:
            self.masters.allocate()
        if not self.is_sharded:
            self.whole.zero_()
            if not self.has_copy:
                self.masters.values = self.whole[slice(*self.masters.covers)]

    def _stored(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """Yields all memory that stores values, for writing, each with its range; see `Shard.pieces`."""
        if self.is_sharded or self.has_copy:
            yield from self.masters.pieces(writes=True, only=only)
        if not self.is_sharded:
            yield self.whole, (0, self.layout.full_numel)

    def bind(self, full: Tensor) -> None:
        """Sets `full`, the memory of the full values, and creates a view of it for each parameter."""
        self.full = full
        self.views = self.layout.views(full)

    def read(self) -> None:
        """Allocates the masters and reads lazily loaded values into them, and into the compute copy if one is kept.
        Runs no collective. Does nothing if no parameter has a source."""
        if not any(self.is_read):
            return
        self._allocate_masters()
        for memory, covers in self._stored():
            for piece in self.layout.param_slices(*covers):
                if self.is_read[piece.index]:
                    out = memory[piece.offset : piece.offset + piece.numel]
                    source_of(self.params[piece.index]).read(piece.start, out, self._home_dtypes[piece.index])

    def fill(self) -> None:
        """Broadcasts rank 0's parameters, except those that `read` has read, into masters and compute copies."""
        if not any(self.is_read):
            self._allocate_masters()
        numel, flattened = self.layout.full_numel, (-1, torch.empty(0))
        for start in range(0, numel, CHUNK_NUMEL):
            stop = min(start + CHUNK_NUMEL, numel)
            pieces = [piece for piece in self.layout.param_slices(start, stop) if not self.is_read[piece.index]]
            if not pieces:  # every rank has read this chunk from its sources
                continue
            values = torch.zeros(stop - start, dtype=self.masters.dtype, device=self.comm.device)
            for piece in pieces:
                if flattened[0] != piece.index:  # once per parameter: `reshape` copies a transposed one
                    flattened = piece.index, local_of(self.params[piece.index]).reshape(-1)
                own = flattened[1][piece.start : piece.start + piece.numel]
                values[piece.offset : piece.offset + piece.numel].copy_(own)
            self._take(values, start, [(piece.offset, piece.offset + piece.numel) for piece in pieces])
        for param, placeholder, is_read in zip(self.params, self.placeholders, self.is_read):
            if is_read or not can_give(param, placeholder):
                give_data(param, placeholder)
        self.barrier()
        if self.compute_shard is not None:
            self.compute_shard.allocate()
            self.refresh().wait()

    def _take(self, values: Tensor, start: int, ranges: list[Range]) -> None:
        """Stores `ranges` of rank 0's `values` (1-D, in the dtype of the masters), which begin at `start` of the
        buffer. The values of other ranks are overwritten."""
        if not self.is_common:
            self.comm.broadcast_(values)
            stored = self._stored((start, start + values.numel()))
        elif self.comm.shard_group.rank == 0:  # it writes for all ranks that share the memory
            if self.comm.replicate_group is not None:
                self.comm.replicate_group.broadcast_(values)
            stored = iter([(self._common, (0, self.layout.full_numel))])
        else:
            return
        for memory, covers in stored:
            for low, high in ranges:
                copy_overlap(memory, covers, values[low:high], (start + low, start + high))

    def barrier(self) -> None:
        """Waits for all ranks if they read one another's masters."""
        if self.is_common:
            self.comm.shard_group.shared_memory.barrier()

    # Values: gathered before use, and updated from the masters

    def all_gather(self, what: str, arriving: Pending | None = None, *, exact: bool = False) -> Pending:
        """Gathers the values of all ranks into `full`.

        Args:
            what (`str`): the name of the unit, for messages.
            arriving (`Pending`, *optional*): a pending copy of this rank's range from disk into `full`.
            exact (`bool`): do not quantize, even if gathers are in 8 bits.
        """
        full, group = self.full, self.comm.shard_group
        if not self.is_sharded:
            has_all = self.masters.numel == self.layout.full_numel
            return DONE if has_all else group.all_gather(full, full[slice(*self.masters.covers)], what=what)
        if self.is_common:
            if full is not self._common:
                group.shared_memory.read(full, self._common, what=what)
            return DONE
        is_exact = exact or self.packing is None
        return self.source.all_gather(full, what, arriving, group.all_gather if is_exact else self.packing.all_gather)

    def refresh(self) -> Pending:
        """Copies the masters to their range of the compute copy. If `begin_refresh` has started that, returns its
        copies."""
        refreshing, self.refreshing = self.refreshing, None
        return self._send_all() if refreshing is None else refreshing

    def begin_refresh(self) -> None:
        """Starts the copies that the next `refresh` returns."""
        self.refreshing = self._send_all()

    def _send_all(self) -> Pending:
        last = DONE
        for values, covers in self.masters.pieces(writes=False) if self.has_copy else ():
            last = self.send(values, covers)
            if self.masters.tier is MemoryTier.DISK:
                self.masters.transfer.bus.synchronize()  # the next piece may reuse this memory
        return last

    def send(self, values: Tensor, covers: Range) -> Pending:
        """Copies a range of the masters to the compute copy, if there is a separate one. `values` may be overwritten
        after `Bus.synchronize`."""
        if not self.has_copy:
            return DONE
        if self.compute_shard is not None:
            return self.compute_shard.write(values, covers)
        return self.masters.copy_to(self.whole[slice(*covers)], values)

    # Parameters: views of the gathered values, or placeholders

    def unshard(self) -> None:
        self._put(self.views if self.cast is None else [view.to(self.cast) for view in self.views])
        if self.is_outdated:
            self._raise_versions(by=-1)

    def outdate_views(self) -> None:
        """Makes autograd refuse a backward that reads saved views of frozen values until the values are gathered
        again: another unit may use their slot now. Gradients of trainable parameters reveal such a backward; frozen
        parameters have none."""
        if not (self.trainable or self.is_outdated or self.whole is not None):
            self._raise_versions(by=1)

    def _raise_versions(self, *, by: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            versions = tuple(p._version + by for p in self.params)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.params), versions)
        self.is_outdated = by > 0

    def reshard(self) -> None:
        self._put(self.placeholders)
        hide(self.params)

    def _put(self, values: list[Tensor]) -> None:
        self.shown = values
        show(self.params)
        put(self.params, values)
        for companions in self._companions:
            companions.follow()

    # Writes by user code, see `guards`

    def write_back(self) -> None:
        """Broadcasts rank 0's full values and updates the masters of elements that user code wrote to the parameters
        or assigned to their `data`."""
        for index in self.assigned():
            self.take_assigned(index)
        self.comm.broadcast_(self.full)
        self.barrier()
        self.follow_written()
        self.barrier()

    def follow_written(self) -> None:
        """Updates the masters of elements of `full` that user code wrote. Other masters keep their values, because the
        compute copy may be rounded."""
        if not (self.is_sharded or self.has_copy):
            return  # the masters are a view of `full`
        for masters, covers in self.masters.pieces(writes=True):
            copies = self.full[slice(*covers)].to(masters.device)
            for master, values in zip(masters.split(CHUNK_NUMEL), copies.split(CHUNK_NUMEL)):
                master.copy_(torch.where(values != master.to(values.dtype), values.to(master.dtype), master))
        if self.compute_shard is not None:
            self.refresh().wait()

    def assigned(self) -> Iterator[int]:
        """Yields the indices of the parameters to whose `data` user code assigned another tensor."""
        if self.shown is self.placeholders:
            return
        for index, (p, shown) in enumerate(zip(self.params, self.shown)):
            if p.numel() and _memory_of(local_of(p)) != _memory_of(shown):
                yield index

    def take_assigned(self, index: int) -> None:
        """Copies the tensor that user code assigned to a parameter's `data` into the parameter's view, and restores
        the view. Raises [`LifecycleError`] if the shape or dtype differs."""
        p, view = self.params[index], self.views[index]
        data = local_of(p)
        if data.shape != view.shape or data.dtype is not view.dtype:
            put([p], [view])
            raise LifecycleError(
                f"{self.infos[index].name}: its new data has shape {list(data.shape)} and {data.dtype}, but it was "
                f"sharded with {list(view.shape)} and {view.dtype}; change it before the model is sharded"
            )
        view.copy_(data)
        put([p], [view])
        self.versions[index] = -1  # counts as written

    def mark_clean(self) -> None:
        """Records that the parameters now have the engine's values. Later changes are writes by user code."""
        with torch._C.DisableTorchFunctionSubclass():
            self.versions = [p._version - self.is_outdated for p in self.params]
        if self.has_copy and self.whole is not None:
            self.bits = self.sample.sum_of(self.full)

    @cached_property
    def sample(self) -> Sample:
        """A sample of the elements of each parameter in the full buffer."""
        return Sample([(span.offset, span.stop) for span in self.layout.spans], self.comm.device)

    @cached_property
    def master_sample(self) -> Sample:
        """A sample of the elements of each parameter in this rank's range of the masters."""
        pieces = self.layout.param_slices(*self.masters.covers)
        return Sample([(piece.offset, piece.offset + piece.numel) for piece in pieces], self.masters.values.device)

    @property
    def sampling(self) -> list[Tensor]:
        """The tensors of the samples created so far."""
        made = [vars(self)[name] for name in ("sample", "master_sample") if name in vars(self)]
        return [tensor for sample in made for tensor in sample.tensors]

    def outdate_forwards(self, written: list[bool]) -> None:
        """Makes autograd refuse a backward through a forward that used old values, as it does when an optimizer
        updates parameters in place: increments the version counters of `written` parameters. `versions` is incremented
        with them, so an interrupted update does not look like a write by user code."""
        increment_version([p for p, is_written in zip(self.params, written) if is_written])
        self.versions = [version + is_written for version, is_written in zip(self.versions, written)]

    def rewritten(self) -> int | None:
        """Returns the index of the first parameter that user code has written to in place, or `None`."""
        if self.cast is not None:
            return None  # inside `computing_in` the modules hold other parameters
        pairs = zip(self.params, self.versions)
        with torch._C.DisableTorchFunctionSubclass():
            return next((index for index, (p, version) in enumerate(pairs) if p._version != version), None)

    def changed(self) -> int | None:
        """Returns the index of the first parameter whose gathered values have changed, or `None`. Each rank compares
        its own range. On an accelerator the comparison waits for the device, so it runs only if a version counter has
        changed, which alone does not prove a change of values."""
        source, written = self.source, self.rewritten()
        if source is None or source.on_disk is not None or (written is None and not self.comm.is_on_cpu):
            return written
        own, gathered = self.full[slice(*source.covers)], source.values.to(self.dtype)
        own, gathered = own.view(torch.uint8), gathered.view(torch.uint8)  # compare bits: NaN != NaN
        if torch.equal(own, gathered):
            return None
        at = int((own != gathered).nonzero()[0]) // self.full.itemsize
        pieces = self.layout.param_slices(*source.covers)
        return next((piece.index for piece in pieces if piece.offset <= at < piece.offset + piece.numel), None)

    def write_master(self, index: int, values: Tensor) -> None:
        """Overwrites this rank's range of one parameter's master. `values`: the full parameter, of any dtype and
        device."""
        span = self.layout.spans[index]
        for master, covers in self.masters.pieces(writes=True, only=(span.offset, span.stop)):
            copy_overlap(master, covers, values.detach().reshape(-1), (span.offset, span.stop))

    def whole_params(self, what: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields every parameter with its full master values in the parameter's original dtype. All ranks must call
        it. The values are read-only."""
        whole = self._whole_master(what)
        for span, p, dtype in zip(self.layout.spans, self.params, self._home_dtypes):
            yield p, whole[span.offset : span.stop].view(span.shape).to(dtype)

    def _whole_master(self, what: str) -> Tensor:
        """Returns the masters of the full buffer on every rank. They are read-only."""
        if not (self.is_sharded or self.has_copy):
            return self.whole
        if self._common is not None:
            return self._common
        has_all = self.masters.numel == self.layout.full_numel
        if has_all and self.masters.tier is not MemoryTier.DISK:
            return self.masters.values
        whole = torch.empty(self.layout.full_numel, dtype=self.masters.dtype, device=self.comm.device)
        for master, (start, stop) in self.masters.pieces(writes=False):
            whole[start:stop].copy_(master)
        if not has_all:
            self.comm.shard_group.all_gather(whole, whole[slice(*self.masters.covers)], what=what).wait()
        return whole

    def restore_params(self, what: str) -> None:
        """Copies the full values of every parameter, in its original dtype, into separate memory, and frees the
        buffer."""
        values = [full.to(device=self.comm.device, copy=True) for _, full in self.whole_params(what)]
        show(self.params)
        put(self.params, values)
        for companions in self._companions:
            companions.follow()
        self.whole = self.compute_shard = self.source = self._common = None
        self.masters.values = self.masters.on_disk = None
        self.full, self.views = None, []

    def named_shards(self, tensor: Tensor, covers: tuple[int, int], only: tuple[int, int]) -> Iterator[NamedShard]:
        """Yields the ranges of the parameters inside `tensor`, which covers `covers`, limited to the range `only`."""
        low, high = max(covers[0], only[0]), min(covers[1], only[1])
        window = tensor[low - covers[0] : max(low, high) - covers[0]]
        for piece in self.layout.param_slices(low, high):
            info = self.infos[piece.index]
            yield NamedShard(info.name, info.shape, piece.start, window[piece.offset : piece.offset + piece.numel])


def copy_overlap(memory: Tensor, covers: Range, values: Tensor, what: Range) -> None:
    """Copies the overlap of two ranges of a buffer from `values` (which covers `what`) into `memory` (which covers
    `covers`)."""
    low, high = max(covers[0], what[0]), min(covers[1], what[1])
    if low < high:
        memory[low - covers[0] : high - covers[0]].copy_(values[low - what[0] : high - what[0]])


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Identifies the start of a tensor's memory. Unlike `data_ptr`, this also works for tensors without data."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
