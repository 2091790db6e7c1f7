"""The parameters of one unit that share dtype and trainability, as one flat buffer divided over the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hf_zero.comm import Comm
from hf_zero.engine.away import Placeholders, hide, show
from hf_zero.engine.divided import is_divided, is_dtensor, local_of, put
from hf_zero.engine.opaque import companions_of
from hf_zero.engine.rest import Rest, copy_overlap
from hf_zero.engine.source import can_give, give_data, source_of
from hf_zero.errors import LifecycleError
from hf_zero.sharding.layout import Layout, Range, Sample
from hf_zero.sharding.placement import Placement


# Values of rank 0 are taken over in parts of so many elements, which are in memory twice.
TAKEN_NUMEL = 2**23


@dataclass(frozen=True)
class ParamInfo:
    """The facts of a parameter that are known without its data."""

    name: str  # its first in `model.named_parameters()`
    shape: torch.Size  # of this rank's part, where tensor-parallel ranks divide it
    save_dtype: torch.dtype  # that it had when it was sharded, in which it is saved
    trainable: bool


@dataclass(frozen=True)
class NamedShard:
    """A range of one parameter (or of a tensor that belongs to it) that this rank holds."""

    name: str  # the parameter's
    shape: torch.Size  # of the whole parameter or tensor
    start: int  # first element of the range, counted in the flattened whole
    tensor: Tensor  # 1-D view of it; writing to it writes the state


class Flat:
    """One flat buffer: its layout, this rank's values, and where the whole values appear when gathered. Infos and
    parameters are in the layout's order; `dtype` is that of the compute copy."""

    full: Tensor  # the compute copy, whole; contents are valid while the unit is gathered
    views: list[Tensor]  # of `full`, one per parameter, in its shape
    shown: list[Tensor]  # what the parameters' data was made last, one per parameter
    # of the compute copy as the master last gave it, a checksum of a sample, see `guards`; None: it is the master
    bits: Tensor | None = None
    versions: list[int]  # of the parameters, when what is in them was last known to be the engine's
    is_away = False  # whether the parameters refuse to be read and written, see `away`
    is_outdated = False  # whether the parameters' versions are raised, see `outdate_views`

    def __init__(
        self,
        infos: list[ParamInfo],
        params: list[nn.Parameter],
        layout: Layout,
        *,
        placement: Placement,
        comm: Comm,
        rest: Rest,
        placeholders: Placeholders,
    ):
        self.infos = infos
        self.params = params
        self.layout = layout
        self.placement = placement
        self.comm = comm
        self.dtype = placement.dtype
        self.rest = rest
        self.trainable = placement.trainable
        self._has_dtensors = any(map(is_dtensor, params))
        self.is_divided = is_divided(params[0])  # over tensor-parallel ranks, as all of one buffer are or none is
        self.owned = layout.owned(comm.shard_group.rank)
        # of what is owned, the range that no other rank measures and saves
        self.part = layout.part(comm.shard_group.rank, comm.replica)
        self.placeholders = [placeholders.of(info.shape, self.dtype) for info in infos]
        self.cast: torch.dtype | None = None  # in which the parameters are shown; None: as they are
        self.is_read = [source_of(p) is not None for p in params]  # which parameters come out of files
        self._home_dtypes = [p.dtype for p in params]
        self._companions = companions_of(params)

    @property
    def slot_part(self) -> tuple[int, torch.dtype]:
        """The size of the whole buffer in a slot: elements and dtype, see `Slot.views`."""
        return self.layout.full_numel, self.dtype

    @property
    def master(self) -> Tensor:
        """This rank's range of the values that the optimizer updates; NaN where they rest on disk."""
        return self.rest.masters.values

    @property
    def scales(self) -> list[Tensor]:
        """What opaque parameters carry beside their data. It stays whole on every rank."""
        return [tensor for companions in self._companions for tensor in companions.scales]

    @property
    def held(self) -> Range:
        """The range of the buffer that the master covers on this rank."""
        return self.rest.masters.covers

    def allocate(self) -> None:
        """Allocates the memory in which whole values rest on this rank, or are shared by all."""
        self.rest.allocate()
        if self.rest.whole is not None:
            self.bind(self.rest.whole)

    def bind(self, full: Tensor) -> None:
        """Sets the memory in which the whole values appear, and makes the parameters' views of it."""
        self.full = full
        self.views = self.layout.views(full)

    def read(self) -> None:
        """Allocates the masters and reads lazily loaded values into them and into a compute copy that rests. No other
        rank takes part. Does nothing where no parameter has a source."""
        if not any(self.is_read):
            return
        self.rest.allocate_masters()
        for memory, covers in self.rest.at_rest():
            for piece in self.layout.param_slices(*covers):
                if self.is_read[piece.index]:
                    out = memory[piece.offset : piece.offset + piece.numel]
                    source_of(self.params[piece.index]).read(piece.start, out, self._home_dtypes[piece.index])

    def fill(self) -> None:
        """Copies rank 0's parameters, without those that `read` has read, into masters and compute copies."""
        if not any(self.is_read):
            self.rest.allocate_masters()
        numel, flattened = self.layout.full_numel, (-1, torch.empty(0))
        for start in range(0, numel, TAKEN_NUMEL):
            stop = min(start + TAKEN_NUMEL, numel)
            pieces = [piece for piece in self.layout.param_slices(start, stop) if not self.is_read[piece.index]]
            if not pieces:  # all of it was read, on every rank: its memory would be taken for nothing
                continue
            values = torch.zeros(stop - start, dtype=self.master.dtype, device=self.comm.device)
            for piece in pieces:
                if flattened[0] != piece.index:  # of a parameter that is transposed it is a copy
                    flattened = piece.index, local_of(self.params[piece.index]).reshape(-1)
                own = flattened[1][piece.start : piece.start + piece.numel]
                values[piece.offset : piece.offset + piece.numel].copy_(own)
            self.rest.take(values, start, [(start + each.offset, start + each.offset + each.numel) for each in pieces])
        for param, placeholder, is_read in zip(self.params, self.placeholders, self.is_read):
            if is_read or not can_give(param, placeholder):
                give_data(param, placeholder)
        self.rest.barrier()
        if self.rest.compute_shard is not None:
            self.rest.compute_shard.allocate()
            self.rest.refresh().wait()

    def unshard(self) -> None:
        self._put(self.views if self.cast is None else [view.to(self.cast) for view in self.views])
        if self.is_outdated:
            self._raise_versions(by=-1)

    def outdate_views(self) -> None:
        """Lets autograd refuse a backward that reads what a forward has kept of frozen values, whose slot may be
        another unit's by now, until they are there again. No gradient of theirs would tell, as trained ones' do."""
        if not (self.trainable or self.is_outdated or self.rest.whole is not None):
            self._raise_versions(by=1)

    def _raise_versions(self, *, by: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            versions = tuple(p._version + by for p in self.params)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.params), versions)
        self.is_outdated = by > 0

    def reshard(self) -> None:
        self._put(self.placeholders)
        hide(self.params)
        self.is_away = True

    def _put(self, values: list[Tensor]) -> None:
        self.shown, self.is_away = values, False
        show(self.params)
        if self._has_dtensors:
            put(self.params, values)
        else:
            for param, value in zip(self.params, values):
                param.data = value
        for companions in self._companions:
            companions.follow()

    def write_back(self) -> None:
        """Copies rank 0's whole values to all ranks. The masters follow what was written to the parameters, or
        assigned to their `data`."""
        for index in self.assigned():
            self.take_assigned(index)
        self.comm.broadcast_(self.full)
        self.rest.barrier()
        self.rest.follow_written(self.full)
        self.rest.barrier()

    def assigned(self) -> Iterator[int]:
        """Yields the parameters to whose data somebody has assigned another tensor."""
        for index, (p, shown) in enumerate(zip(self.params, self.shown) if not self.is_away else ()):
            if p.numel() and _memory_of(local_of(p)) != _memory_of(shown):
                yield index

    def take_assigned(self, index: int) -> None:
        """Copies what was assigned to a parameter's `data` to where its values lie, which it shows again. Raises
        [`LifecycleError`] when that has another shape or dtype."""
        p, view = self.params[index], self.views[index]
        data = local_of(p)
        if data.shape != view.shape or data.dtype is not view.dtype:
            put([p], [view])
            raise LifecycleError(
                f"{self.infos[index].name}: was given data of shape {list(data.shape)} and {data.dtype}, and is "
                f"sharded with {list(view.shape)} and {view.dtype}; change it before the model is sharded"
            )
        view.copy_(data)
        put([p], [view])
        self.versions[index] = -1  # it counts as written

    def mark_clean(self) -> None:
        """Notes that the parameters now have the engine's values, so that a later change is one by user code."""
        with torch._C.DisableTorchFunctionSubclass():
            self.versions = [p._version - self.is_outdated for p in self.params]
        if self.rest.has_copy and self.rest.whole is not None:
            self.bits = self.sample.sum_of(self.full)

    @cached_property
    def sample(self) -> Sample:
        """Elements of each parameter, wherever they rest whole."""
        return Sample([(span.offset, span.stop) for span in self.layout.spans], self.comm.device)

    @cached_property
    def master_sample(self) -> Sample:
        """Elements of each parameter of which this rank holds the master, counted in its range."""
        pieces = self.layout.param_slices(*self.held)
        return Sample([(piece.offset, piece.offset + piece.numel) for piece in pieces], self.master.device)

    @property
    def sampling(self) -> list[Tensor]:
        """The memory of samples that have been taken."""
        made = [vars(self)[name] for name in ("sample", "master_sample") if name in vars(self)]
        return [tensor for sample in made for tensor in sample.tensors]

    def outdate_forwards(self, written: list[bool]) -> None:
        """Lets autograd refuse a backward through a forward of former values, as it does where an optimizer writes to
        the parameters themselves: the versions change of those that are `written`. They stay the engine's, also where
        it breaks off before `mark_clean`."""
        increment_version([p for p, is_written in zip(self.params, written) if is_written])
        self.versions = [version + is_written for version, is_written in zip(self.versions, written)]

    def rewritten(self) -> int | None:
        """Returns the first parameter that somebody has written to in place; `None` where nobody has."""
        if self.cast is not None:
            return None  # what is shown meanwhile are other parameters
        pairs = zip(self.params, self.versions)
        with torch._C.DisableTorchFunctionSubclass():
            return next((index for index, (p, version) in enumerate(pairs) if p._version != version), None)

    def changed(self) -> int | None:
        """Returns the first parameter whose whole values are no longer those that were gathered; `None` where there is
        none. A rank looks at its own range. A device, which would have to be waited for, is asked only where a version
        counter has moved, which also happens where a write changes nothing."""
        source, written = self.rest.source, self.rewritten()
        if source is None or source.on_disk is not None or (written is None and not self.comm.is_on_cpu):
            return written
        own, gathered = self.full[slice(*source.covers)], source.values.to(self.dtype)
        own, gathered = own.view(torch.uint8), gathered.view(torch.uint8)  # a NaN is equal to itself
        if torch.equal(own, gathered):
            return None
        at = int((own != gathered).nonzero()[0]) // self.full.itemsize
        pieces = self.layout.param_slices(*source.covers)
        return next((piece.index for piece in pieces if piece.offset <= at < piece.offset + piece.numel), None)

    def write_master(self, index: int, values: Tensor) -> None:
        """Overwrites this rank's range of one parameter's master. `values`: all of it, of any dtype and device."""
        span = self.layout.spans[index]
        for master, covers in self.rest.masters.pieces(writes=True, only=(span.offset, span.stop)):
            copy_overlap(master, covers, values.detach().reshape(-1), (span.offset, span.stop))

    def whole_params(self, what: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields every parameter with its values as the optimizer has them: whole, and in the dtype that it came with.
        All ranks call it; the values are to be read only."""
        whole = self.rest.whole_master(what)
        for span, p, dtype in zip(self.layout.spans, self.params, self._home_dtypes):
            yield p, whole[span.offset : span.stop].view(span.shape).to(dtype)

    def restore_params(self, what: str) -> None:
        """Puts every parameter's values, whole and in the dtype that it came with, into memory of its own."""
        for p, values in self.whole_params(what):
            show([p])
            put([p], [values.to(device=self.comm.device, copy=True)])
        for companions in self._companions:
            companions.follow()
        self.rest.release()
        self.full, self.views = None, []

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
