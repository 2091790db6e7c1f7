"""The parameters of one unit that share dtype and trainability, as one flat buffer divided over the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm, Pending
from hf_zero.config import MemoryTier, Residency, StagePlan
from hf_zero.engine.divided import is_divided, local_of, put
from hf_zero.engine.host_transfer import HostTransfer
from hf_zero.engine.opaque import companions_of
from hf_zero.engine.placeholder import Placeholders, is_untouched
from hf_zero.engine.source import give_data, source_of
from hf_zero.errors import LifecycleError
from hf_zero.sharding.bits import bits_of
from hf_zero.sharding.layout import Layout


if TYPE_CHECKING:
    from hf_zero.storage import DiskTensor


Range = tuple[int, int]  # [start, stop), counted in the buffer


@dataclass(frozen=True)
class ParamInfo:
    """The facts of a parameter that do not need its data.

    Args:
        name (`str`): its first name in `model.named_parameters()`.
        shape (`torch.Size`): of the parameter; of this rank's part, where tensor-parallel ranks divide it.
        save_dtype (`torch.dtype`): the dtype that it had when it was sharded, in which it is saved.
        trainable (`bool`): whether it gets gradients.
    """

    name: str
    shape: torch.Size
    save_dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class NamedShard:
    """A range of one parameter (or of a tensor that belongs to it) that this rank holds.

    Args:
        name (`str`): the parameter's name.
        shape (`torch.Size`): of the whole parameter or tensor.
        start (`int`): first element of the run, counted in the flattened whole.
        tensor (`Tensor`): 1-D view of the run; writing to it writes the state.
    """

    name: str
    shape: torch.Size
    start: int
    tensor: Tensor


class Flat:
    """One flat buffer: its layout, this rank's values, and where the whole values appear when gathered.

    Args:
        infos (`list[ParamInfo]`): the parameters, in the layout's order.
        params (`list[nn.Parameter]`): likewise.
        layout (`Layout`): where each lies.
        plan (`StagePlan`): what rests where.
        comm (`Comm`): the data-parallel ranks.
        dtype (`torch.dtype`): of the compute copy.
        master_dtype (`torch.dtype`): of the master.
        placeholders (`Placeholders`): what the parameters read while their data is away.
        host_transfer (`HostTransfer`): to and from the host's memory, where anything rests there.
    """

    full: Tensor  # the compute copy, whole; contents are valid while the unit is gathered
    master: Tensor  # the values at rest, as far as this rank updates them; often the compute copy itself
    on_disk: "DiskTensor | None" = None  # where the master rests, `master` being NaN (see `masters`); None: in memory
    compute_shard_on_disk: "DiskTensor | None" = None  # where it rests, `compute_shard` being None
    # the compute copy of this rank's range at rest; None where all-gathers take the master's own values
    compute_shard: Tensor | None = None
    refreshing: Pending | None = None  # the compute copy is being made to follow the master already
    common: Tensor | None = None  # all ranks' masters, where the ranks share memory; this rank's is its part of it
    views: list[Tensor]  # of `full`, one per parameter, in its shape
    shown: list[Tensor]  # what the parameters' data was made last, one per parameter
    bits: Tensor | None = None  # of the compute copy as the master last gave it, see `writes`; None: it is the master
    versions: list[int]  # of the parameters, when what is in them was last known to be the engine's
    # how many held each parameter when its use was over, autograd among them, see `away`; None while it is used
    holders: list[int] | None = None

    def __init__(
        self,
        infos: list[ParamInfo],
        params: list[nn.Parameter],
        layout: Layout,
        *,
        plan: StagePlan,
        comm: Comm,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        placeholders: Placeholders,
        host_transfer: HostTransfer,
    ):
        self.infos = infos
        self.params = params
        self.layout = layout
        self.plan = plan
        self.comm = comm
        self.dtype = dtype
        self.master_dtype = master_dtype
        self.host_transfer = host_transfer
        self.trainable = infos[0].trainable
        # what is not trained has neither state nor gradients: it rests where parameters rest
        self.master_at = plan.master_at if self.trainable else plan.compute_at
        self.is_divided = is_divided(params[0])  # over tensor-parallel ranks, as all of one buffer are or none is
        # where the masters of all ranks rest, if they share memory and that is where masters rest
        self.shared_memory = comm.shared_memory if self.is_sharded and not self.is_away else None
        self.owned = layout.owned(comm.rank)
        self.placeholders = [placeholders.of(info.shape, dtype) for info in infos]
        self.cast: torch.dtype | None = None  # in which the parameters are shown; None: as they are
        self.is_read = [source_of(p) is not None for p in params]  # which parameters come out of files
        self._home_dtypes = [p.dtype for p in params]
        self._companions = companions_of(params)

    @property
    def slot_part(self) -> tuple[int, torch.dtype]:
        """What a slot must hold for the whole buffer: elements and dtype, see `Slot.views`."""
        return self.layout.full_numel, self.dtype

    @property
    def is_away(self) -> bool:
        """Whether the master rests elsewhere than on the device."""
        return self.master_at is not MemoryTier.DEVICE

    @property
    def rests_whole(self) -> bool:
        """Whether the whole compute copy is at hand without a gather: each rank's own, or one for all ranks."""
        return not self.is_sharded or (self.shared_memory is not None and self.master_dtype is self.dtype)

    @property
    def has_compute_shard(self) -> bool:
        """Whether gathers take values that are not the master's own: it is elsewhere, or to be cast on the host."""
        differs = self.master_at is not self.plan.compute_at or self.master_dtype is not self.dtype
        return self.is_sharded and self.is_away and (differs or (self.trainable and self.plan.lags))

    @property
    def _has_copy(self) -> bool:
        """Whether compute copies rest that are to follow the master."""
        return self.has_master or self.has_compute_shard

    @property
    def is_sharded(self) -> bool:
        return self.plan.compute is Residency.SHARDED

    @property
    def needs_spread(self) -> bool:
        """Whether every rank holds the whole compute copy but updates only its own range."""
        return not self.is_sharded and self.plan.master is Residency.SHARDED

    @property
    def has_master(self) -> bool:
        """Whether the master is a tensor beside the compute copy. Where that does not rest, the master is all."""
        return not self.is_sharded and (self.master_dtype is not self.dtype or self.is_away)

    @property
    def held(self) -> tuple[int, int]:
        """The range of the buffer that the master covers on this rank."""
        return (0, self.layout.full_numel) if self.plan.master is Residency.REPLICATED else self.owned

    def allocate(self) -> None:
        """Allocates the memory in which whole values rest on this rank, or are shared by all."""
        numel = self.layout.full_numel
        if self.shared_memory is not None:
            self.common = self.shared_memory.common(numel, self.master_dtype)
        if self.rests_whole:
            self.bind(self.comm.empty(numel, self.dtype) if self.common is None else self.common)

    def _memory_barrier(self) -> None:
        """Waits for all ranks, where they read one another's masters."""
        if self.shared_memory is not None:
            self.shared_memory.barrier()

    def bind(self, full: Tensor) -> None:
        """Names the memory in which the whole values appear, and makes the parameters' views of it."""
        self.full = full
        self.views = [full[span.offset : span.stop].view(span.shape) for span in self.layout.spans]

    def read(self) -> None:
        """Makes the memory of the master and reads into it, and into the compute copy where it rests, what lies in
        files. No other rank takes part. Does nothing where no parameter has a source."""
        if not any(self.is_read):
            return
        if self.common is not None:
            self.master = self.common[slice(*self.held)]
        elif not self.is_sharded and not self.has_master:
            self.master = self.full.zero_()[slice(*self.held)]
        else:
            self.master = self._new_master()
        if self.has_master:
            self.full.zero_()
        for memory, covers in self._at_rest():
            for piece in self.layout.param_slices(*covers):
                if self.is_read[piece.index]:
                    out = memory[piece.offset : piece.offset + piece.numel]
                    source_of(self.params[piece.index]).read(piece.start, out, self._home_dtypes[piece.index])

    def _new_master(self) -> Tensor:
        if self.on_disk is None:
            return self._new_shard(self.master_dtype, self.is_away)
        return Placeholders(self.host_transfer.bus.host).of(torch.Size([self.on_disk.numel]), self.master_dtype)

    def _new_shard(self, dtype: torch.dtype, away: bool) -> Tensor:
        """Memory, zero, in which this rank's range rests: on the host or on the device."""
        numel = self.held[1] - self.held[0]
        if away:  # the device takes and gives values of its own dtype alone
            return self.host_transfer.bus.empty(numel, dtype, locked=dtype is self.dtype)
        return torch.zeros(numel, dtype=dtype, device=self.comm.device)

    def masters(self, *, writes: bool, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """The master, whole or in pieces that are in memory one after the other, each with the range that it covers.

        Args:
            writes (`bool`): what is written to it lasts.
            only (`Range`, *optional*): the pieces in which anything of this range of the buffer lies.
        """
        if self.on_disk is None:
            yield self.master, self.held
            return
        first = self.held[0]
        within = None if only is None else (only[0] - first, only[1] - first)
        for start, values in self.on_disk.pieces(writes=writes, only=within):
            yield values, (first + start, first + start + values.numel())

    def cut(self, start: int, stop: int) -> list[Range]:
        """Cuts a part of the held range where another piece of `masters` begins."""
        if self.on_disk is None:
            return [(start, stop)]
        first = self.held[0]
        cuts = [(first + low, first + high) for low, high in self.on_disk.windows]
        return [(max(low, start), min(high, stop)) for low, high in cuts if low < stop and start < high]

    def _at_rest(self, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """All memory in which values rest on this rank, to be written, each with the range that it covers."""
        if self.is_sharded or self.has_master:
            yield from self.masters(writes=True, only=only)
        if not self.is_sharded:
            yield self.full, (0, self.layout.full_numel)

    def fill(self) -> None:
        """Takes over the parameters' data: rank 0's values, into the master and, where it rests, the compute copy."""
        if any(self.is_read):
            self._fill_rest()
        elif self.common is not None:
            if self.comm.rank == 0:
                self._copy_params(self.common)
            self._memory_barrier()
            self.master = self.common[slice(*self.held)]
        else:
            self._fill_from_params()
        if self.has_compute_shard:
            if self.compute_shard_on_disk is None:
                self.compute_shard = self._new_shard(self.dtype, self.plan.compute_at is not MemoryTier.DEVICE)
            self.refresh().wait()

    def _fill_rest(self) -> None:
        """Takes over rank 0's values of the parameters that were not read."""
        for index, (span, param) in enumerate(zip(self.layout.spans, self.params)):
            if self.is_read[index]:
                give_data(param, self.placeholders[index])
                continue
            whole = local_of(param).to(device=self.comm.device, dtype=self.master_dtype).reshape(-1).clone()
            self.comm.broadcast_(whole)
            for memory, (start, stop) in self._at_rest((span.offset, span.stop)):
                low, high = max(span.offset, start), min(span.stop, stop)
                if low < high:
                    memory[low - start : high - start].copy_(whole[low - span.offset : high - span.offset])
        self._memory_barrier()

    def _fill_from_params(self) -> None:
        whole = self.full if self.master_dtype is self.dtype else torch.empty_like(self.full, dtype=self.master_dtype)
        self._copy_params(whole.zero_())
        self.comm.broadcast_(whole)
        if whole is not self.full and not self.is_sharded:
            self.full.copy_(whole)
        held = whole[slice(*self.held)]
        if self.is_away:
            self.master = self._new_master()
            for master, (start, stop) in self.masters(writes=True):
                master.copy_(whole[start:stop])
            return
        # a slot is another unit's next, and a whole master of which this rank holds a part is given up
        is_lent = self.is_sharded or (whole is not self.full and held.numel() < whole.numel())
        self.master = held.clone() if is_lent else held

    def _copy_params(self, whole: Tensor) -> None:
        for span, p in zip(self.layout.spans, self.params):
            whole[span.offset : span.stop].copy_(local_of(p).reshape(-1))

    @property
    def source_on_disk(self) -> "DiskTensor | None":
        """The values that all-gathers take, where they rest on disk."""
        if not self.is_sharded or self.plan.compute_at is not MemoryTier.DISK:
            return None
        return self.compute_shard_on_disk if self.has_compute_shard else self.on_disk

    def all_gather(self, what: str, arriving: Pending | None = None) -> Pending:
        """Brings the whole values into `full`: this rank's range is written, cast if need be, and sent from there.

        Args:
            what (`str`): the unit's name, for messages.
            arriving (`Pending`, *optional*): of the range, which is on its way there from the disk.
        """
        if self.common is not None:
            if self.full is not self.common:
                self.shared_memory.read(self.full, self.common, what=what)
            return Pending()
        own = self.full[slice(*self.owned)]
        source = self.master if self.compute_shard is None else self.compute_shard
        if self.is_sharded and self.plan.compute_at is not MemoryTier.DEVICE:
            return self._gather_from_host(own, source, what, arriving)
        if self.is_sharded:
            own.copy_(source)
        return self.comm.all_gather(self.full, own, what=what)

    def _gather_from_host(self, own: Tensor, source: Tensor, what: str, arriving: Pending | None) -> Pending:
        # what computes meanwhile waits for neither copy nor collective
        with self.host_transfer.bus.on_side_stream("up"):
            transfer = self.host_transfer.bus.up(own, source) if arriving is None else arriving
            gathering = self.comm.all_gather(self.full, own, what=what)

        def finish():
            transfer.wait()
            gathering.wait()

        return Pending(finish)

    def unshard(self) -> None:
        self._put(self.views if self.cast is None else [view.to(self.cast) for view in self.views])
        self.holders = None

    def reshard(self) -> None:
        self._put(self.placeholders)
        if self.holders is None:
            self.end_use()

    def end_use(self) -> None:
        """Notes that the module that the parameters belong to has used them; they may stay for a while."""
        self.holders = [param._use_count() for param in self.params]

    def _put(self, values: list[Tensor]) -> None:
        self.shown = values
        for p, value in zip(self.params, values):
            put(p, value)
        for companions in self._companions:
            companions.follow()

    def refresh(self) -> Pending:
        """Writes the compute copy of the range that the master covers, unless that has begun already."""
        refreshing, self.refreshing = self.refreshing, None
        return self._send_all() if refreshing is None else refreshing

    def begin_refresh(self) -> None:
        """Begins the transfer that the next `refresh` returns."""
        self.refreshing = self._send_all()

    def _send_all(self) -> Pending:
        transfer = Pending()
        for master, covers in self.masters(writes=False) if self._has_copy else ():
            transfer = self.send(master, covers)
            if self.on_disk is not None:
                self.host_transfer.bus.synchronize()  # the next piece may come into its memory
        return transfer

    def send(self, master: Tensor, covers: Range) -> Pending:
        """Writes the compute copy of a range, if it is not the master itself.

        Args:
            master (`Tensor`): the master's values there, to be overwritten after a `Bus.synchronize`.
            covers (`Range`): the range, counted in the buffer.
        """
        if not self._has_copy:
            return Pending()
        if self.compute_shard_on_disk is not None:
            self.compute_shard_on_disk.write(covers[0] - self.held[0], master)
            return Pending()
        first = 0 if self.has_master else self.held[0]
        target = (self.full if self.has_master else self.compute_shard)[covers[0] - first : covers[1] - first]
        if self.is_away and (self.has_master or self.plan.compute_at is MemoryTier.DEVICE):
            return self.host_transfer.up(target, master)
        target.copy_(master)
        return Pending()

    def write_back(self) -> None:
        """Makes rank 0's whole values everyone's: the master follows what was written to the parameters, or assigned
        to their `data`."""
        for index in self.assigned():
            self.take_assigned(index)
        self.comm.broadcast_(self.full)
        self._memory_barrier()
        if self.is_sharded or self.has_master:
            self.follow_written()
            if self.has_compute_shard:
                self.refresh().wait()
        self._memory_barrier()

    def follow_written(self) -> None:
        """Lets the master follow what was written to `full`. What was not keeps its master: the compute copy may be a
        rounded one."""
        for master, (start, stop) in self.masters(writes=True):
            values = self.full[start:stop].to(master.device)
            written = values != master.to(values.dtype)
            master.copy_(torch.where(written, values.to(master.dtype), master))

    @property
    def shows_placeholders(self) -> bool:
        """Whether all parameters show placeholders that nobody has written to. Of DTensors it is not known at once."""
        return all(map(is_untouched, self.params))

    def assigned(self) -> Iterator[int]:
        """Yields the parameters to whose data somebody has assigned another tensor."""
        if self.shows_placeholders:
            return
        for index, (p, shown) in enumerate(zip(self.params, self.shown)):
            values = local_of(p)
            # a placeholder is asked first: who takes its address counts as one who writes to it
            if not is_untouched(values) and p.numel() and _memory_of(values) != _memory_of(shown):
                yield index

    def take_assigned(self, index: int) -> None:
        """Copies what was assigned to a parameter's `data` to where its values lie, which it shows again.

        Raises:
            `LifecycleError`: when that has another shape or dtype.
        """
        p, view = self.params[index], self.views[index]
        data = local_of(p)
        if data.shape != view.shape or data.dtype is not view.dtype:
            put(p, view)
            raise LifecycleError(
                f"{self.infos[index].name}: was given data of shape {list(data.shape)} and {data.dtype}, and is "
                f"sharded with {list(view.shape)} and {view.dtype}; change it before the model is sharded"
            )
        view.copy_(data)
        put(p, view)
        self.versions[index] = -1  # it counts as written

    def mark_clean(self) -> None:
        """Notes that the parameters are as the engine made them: later changes are written by somebody else."""
        self.versions = [p._version for p in self.params]
        if self.has_master:
            self.bits = bits_of(self.full)

    def rewritten(self) -> int | None:
        """Returns the first parameter that somebody has written to in place; `None` where nobody has."""
        if self.cast is not None:
            return None  # what is shown meanwhile are other parameters
        pairs = zip(self.params, self.versions)
        return next((index for index, (p, version) in enumerate(pairs) if p._version != version), None)

    def write_master(self, index: int, values: Tensor) -> None:
        """Overwrites what this rank has of one parameter's master.

        Args:
            index (`int`): which parameter.
            values (`Tensor`): all of it, of any dtype and device.
        """
        span, values = self.layout.spans[index], values.detach().reshape(-1)
        for master, (start, stop) in self.masters(writes=True, only=(span.offset, span.stop)):
            low, high = max(span.offset, start), min(span.stop, stop)
            if low < high:
                master[low - start : high - start].copy_(values[low - span.offset : high - span.offset])

    def restore_params(self, what: str) -> None:
        """Puts every parameter's values, whole and in the dtype that it came with, into memory of its own."""
        whole = self.whole_master(what)
        for span, p, dtype in zip(self.layout.spans, self.params, self._home_dtypes):
            values = whole[span.offset : span.stop].view(span.shape)
            put(p, values.to(device=self.comm.device, dtype=dtype, copy=True))
        for companions in self._companions:
            companions.follow()
        self._memory_barrier()
        self.full = self.master = self.common = self.compute_shard = self.on_disk = self.compute_shard_on_disk = None
        self.views = []

    def whole_master(self, what: str) -> Tensor:
        """Returns the masters of the whole buffer, on every rank; to be read only."""
        is_replicated = self.plan.master is Residency.REPLICATED
        if self.common is not None or (is_replicated and self.on_disk is None):
            return self.master if self.common is None else self.common
        if not self.is_sharded and not self.has_master:
            return self.full
        whole = torch.empty(self.layout.full_numel, dtype=self.master_dtype, device=self.comm.device)
        for master, (start, stop) in self.masters(writes=False):
            whole[start:stop].copy_(master)
        if not is_replicated:
            self.comm.all_gather(whole, whole[slice(*self.owned)], what=what).wait()
        return whole

    def named_shards(self, tensor: Tensor, covers: tuple[int, int], only: tuple[int, int]) -> Iterator[NamedShard]:
        """Yields the parameters' ranges inside `tensor`, which covers the range `covers`, limited to `only`."""
        low, high = max(covers[0], only[0]), min(covers[1], only[1])
        window = tensor[low - covers[0] : max(low, high) - covers[0]]
        for piece in self.layout.param_slices(low, high):
            info = self.infos[piece.index]
            yield NamedShard(info.name, info.shape, piece.start, window[piece.offset : piece.offset + piece.numel])


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Returns where a tensor begins: unlike its address, this is also known of tensors without data."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
