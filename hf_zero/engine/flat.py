"""The parameters of one unit that share dtype and trainability, as one flat buffer divided over the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm, Pending
from hf_zero.config import Residency, StagePlan
from hf_zero.engine.opaque import companions_of
from hf_zero.engine.placeholder import Placeholders
from hf_zero.engine.source import give_data, source_of
from hf_zero.shard.layout import Layout


@dataclass(frozen=True)
class ParamInfo:
    """What is known of a parameter without its data.

    Args:
        name (`str`): its first name in `model.named_parameters()`.
        shape (`torch.Size`): of the whole parameter.
        save_dtype (`torch.dtype`): the dtype that it had when it was sharded, in which it is saved.
        trainable (`bool`): whether it gets gradients.
    """

    name: str
    shape: torch.Size
    save_dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class NamedShard:
    """A run of one parameter (or of a tensor that belongs to it) that this rank holds.

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
    """

    full: Tensor  # the compute copy, whole; contents are valid while the unit is gathered
    master: Tensor  # the values at rest, as far as this rank updates them; often the compute copy itself
    common: Tensor | None = None  # all ranks' masters, where the ranks share memory; this rank's is its part of it
    views: list[Tensor]  # of `full`, one per parameter, in its shape

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
    ):
        self.infos = infos
        self.params = params
        self.layout = layout
        self.plan = plan
        self.comm = comm
        self.dtype = dtype
        self.master_dtype = master_dtype
        self.trainable = infos[0].trainable
        self.owned = layout.owned(comm.rank)
        self.placeholders = [placeholders.of(p.shape, dtype) for p in params]
        self.cast: torch.dtype | None = None  # in which the parameters are shown; None: as they are
        self.is_read = [source_of(p) is not None for p in params]  # which parameters come out of files
        self._home_dtypes = [p.dtype for p in params]
        self._companions = companions_of(params)

    @property
    def slot_part(self) -> tuple[int, torch.dtype]:
        """What a slot must hold for the whole buffer: elements and dtype, see `Slot.views`."""
        return self.layout.full_numel, self.dtype

    @property
    def rests_whole(self) -> bool:
        """Whether the whole compute copy is at hand without a gather: each rank's own, or one for all ranks."""
        return not self.is_sharded or (self.comm.shares_memory and self.master_dtype is self.dtype)

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
        return not self.is_sharded and self.master_dtype is not self.dtype

    @property
    def held(self) -> tuple[int, int]:
        """The range of the buffer that the master covers on this rank."""
        return (0, self.layout.full_numel) if self.plan.master is Residency.REPLICATED else self.owned

    def rest(self) -> None:
        """Makes the memory in which whole values rest on this rank, or are shared by all."""
        numel = self.layout.full_numel
        if self.is_sharded and self.comm.shares_memory:
            self.common = self.comm.common(numel, self.master_dtype)
        if self.rests_whole:
            self.bind(self.comm.empty(numel, self.dtype) if self.common is None else self.common)

    def bind(self, full: Tensor) -> None:
        """Names the memory in which the whole values appear, and makes the parameters' views of it."""
        self.full = full
        self.views = [full[place.offset : place.stop].view(place.shape) for place in self.layout.places]

    def read(self) -> None:
        """Makes the memory of the master and reads into it, and into the compute copy where it rests, what lies in
        files. No other rank takes part. Does nothing where no parameter has a source."""
        if not any(self.is_read):
            return
        if self.common is not None:
            self.master = self.common[slice(*self.held)]
        elif not self.is_sharded and self.master_dtype is self.dtype:
            self.master = self.full.zero_()[slice(*self.held)]
        else:
            self.master = torch.zeros(self.held[1] - self.held[0], dtype=self.master_dtype, device=self.comm.device)
        if self.has_master:
            self.full.zero_()
        for memory, covers in self._at_rest():
            for piece in self.layout.pieces(*covers):
                if self.is_read[piece.index]:
                    out = memory[piece.offset : piece.offset + piece.numel]
                    source_of(self.params[piece.index]).read(piece.start, out, self._home_dtypes[piece.index])

    def _at_rest(self) -> list[tuple[Tensor, tuple[int, int]]]:
        """All memory in which values rest on this rank, each with the range of the buffer that it covers."""
        if self.is_sharded:
            return [(self.master, self.held)]
        whole = [(self.full, (0, self.layout.full_numel))]
        return [(self.master, self.held), *whole] if self.has_master else whole

    def fill(self) -> None:
        """Takes over the parameters' data: rank 0's values, into the master and, where it rests, the compute copy."""
        if any(self.is_read):
            self._fill_rest()
        elif self.common is not None:
            if self.comm.rank == 0:
                self._copy_params(self.common)
            self.comm.fence()
            self.master = self.common[slice(*self.held)]
        else:
            self._fill_from_params()

    def _fill_rest(self) -> None:
        """Takes over rank 0's values of the parameters that were not read."""
        for index, (place, param) in enumerate(zip(self.layout.places, self.params)):
            if self.is_read[index]:
                give_data(param, self.placeholders[index])
                continue
            whole = param.detach().to(device=self.comm.device, dtype=self.master_dtype).reshape(-1).clone()
            self.comm.broadcast_(whole)
            for memory, (start, stop) in self._at_rest():
                low, high = max(place.offset, start), min(place.stop, stop)
                if low < high:
                    memory[low - start : high - start].copy_(whole[low - place.offset : high - place.offset])
        self.comm.fence()

    def _fill_from_params(self) -> None:
        whole = self.full if self.master_dtype is self.dtype else torch.empty_like(self.full, dtype=self.master_dtype)
        self._copy_params(whole.zero_())
        self.comm.broadcast_(whole)
        if whole is not self.full and not self.is_sharded:
            self.full.copy_(whole)
        held = whole[slice(*self.held)]
        # a slot is another unit's next, and a whole master of which this rank holds a part is given up
        is_lent = self.is_sharded or (whole is not self.full and held.numel() < whole.numel())
        self.master = held.clone() if is_lent else held

    def _copy_params(self, whole: Tensor) -> None:
        for place, p in zip(self.layout.places, self.params):
            whole[place.offset : place.stop].copy_(p.detach().reshape(-1))

    def gather(self, what: str) -> Pending:
        """Brings the whole values into `full`: this rank's range is written, cast if need be, and sent from there."""
        if self.common is not None:
            if self.full is not self.common:
                self.comm.read_common(self.full, self.common)
            return Pending()
        own = self.full[slice(*self.owned)]
        if self.is_sharded:
            own.copy_(self.master)
        return self.comm.gather(self.full, own, what=what)

    def attach(self) -> None:
        self._put(self.views if self.cast is None else [view.to(self.cast) for view in self.views])

    def detach(self) -> None:
        self._put(self.placeholders)

    def _put(self, values: list[Tensor]) -> None:
        for p, value in zip(self.params, values):
            p.data = value
        for companions in self._companions:
            companions.follow()

    def refresh(self) -> None:
        """Writes the compute copy of the range that the master covers."""
        if self.has_master:
            self.full[slice(*self.held)].copy_(self.master)

    def take_back(self) -> None:
        """Makes rank 0's whole values everyone's: the master follows what was written to the parameters, or assigned
        to their `data`."""
        for p, view in zip(self.params, self.views):
            if p.data_ptr() != view.data_ptr():
                view.copy_(p.data)
        self.attach()
        self.comm.broadcast_(self.full)
        self.comm.fence()
        if self.is_sharded or self.has_master:
            # What was not written keeps its master: the compute copy may be a rounded one.
            values = self.full[slice(*self.held)]
            written = values != self.master.to(values.dtype)
            self.master.copy_(torch.where(written, values.to(self.master.dtype), self.master))
        self.comm.fence()

    def give_back(self, what: str) -> None:
        """Puts every parameter's values, whole and in the dtype that it came with, into memory of its own."""
        whole = self.whole_master(what)
        for place, p, dtype in zip(self.layout.places, self.params, self._home_dtypes):
            p.data = whole[place.offset : place.stop].view(place.shape).to(dtype, copy=True)
        for companions in self._companions:
            companions.follow()
        self.comm.fence()
        self.full = self.master = self.common = None
        self.views = []

    def whole_master(self, what: str) -> Tensor:
        """The values as the optimizer has them, whole, on every rank; to be read only."""
        if self.common is not None or self.plan.master is Residency.REPLICATED:
            return self.master if self.common is None else self.common
        if not self.is_sharded and not self.has_master:
            return self.full
        whole = torch.empty(self.layout.full_numel, dtype=self.master_dtype, device=self.comm.device)
        own = whole[slice(*self.owned)].copy_(self.master)
        self.comm.gather(whole, own, what=what).wait()
        return whole

    def named_shards(self, tensor: Tensor, covers: tuple[int, int], only: tuple[int, int]) -> Iterator[NamedShard]:
        """The parameters' runs inside `tensor`, which covers the range `covers` of the buffer, limited to `only`."""
        low, high = max(covers[0], only[0]), min(covers[1], only[1])
        window = tensor[low - covers[0] : high - covers[0]]
        for piece in self.layout.pieces(low, high):
            info = self.infos[piece.index]
            yield NamedShard(info.name, info.shape, piece.start, window[piece.offset : piece.offset + piece.numel])
