"""The range of a flat buffer that one rank holds, in the memory where it rests: the device's, the host's, or files."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hf_zero.comm import Comm, Pending
from hf_zero.config import MemoryTier
from hf_zero.engine.host_transfer import HostTransfer
from hf_zero.engine.placeholder import Placeholders
from hf_zero.sharding.layout import Range


if TYPE_CHECKING:
    from hf_zero.storage import DiskTensor


class Gathers(Protocol):
    """A collective that fills a buffer from the ranges of all ranks."""

    def __call__(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        """Does what `Comm.all_gather` says."""


class DeviceShard:
    """A range of a flat buffer that rests in the device's memory.

    Args:
        locked (`bool`): where it lies on the host, the device copies from and to it by itself.
    """

    tier = MemoryTier.DEVICE
    on_disk: "DiskTensor | None" = None  # where the values rest, `values` being NaN; None: in memory
    values: Tensor  # 1-D

    def __init__(self, covers: Range, dtype: torch.dtype, comm: Comm, transfer: HostTransfer, *, locked: bool):
        self.covers = covers
        self.numel = covers[1] - covers[0]
        self.dtype = dtype
        self._comm = comm
        self.transfer = transfer
        self._locked = locked

    def allocate(self) -> None:
        """Allocates memory for the values, filled with zeros."""
        self.values = torch.zeros(self.numel, dtype=self.dtype, device=self._comm.device)

    def pieces(self, *, writes: bool, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """Yields the values, whole or in pieces that are in memory in turn, each with the range that it covers.

        Args:
            writes (`bool`): what is written to them lasts.
            only (`Range`, *optional*): the pieces in which anything of this range of the buffer lies.
        """
        yield self.values, self.covers

    def cut(self, start: int, stop: int) -> list[Range]:
        """Cuts a part of the range at the boundaries of the pieces."""
        return [(start, stop)]

    def copy_to(self, target: Tensor, values: Tensor) -> Pending:
        """Copies a piece to the device. The piece may be overwritten after a `Bus.synchronize`."""
        target.copy_(values)
        return Pending()

    def write(self, values: Tensor, covers: Range) -> Pending:
        """Overwrites a part with values on the host. These may be overwritten after a `Bus.synchronize`."""
        return self.transfer.up(self._part(covers), values)

    def _part(self, covers: Range) -> Tensor:
        return self.values[covers[0] - self.covers[0] : covers[1] - self.covers[0]]

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None, gather: Gathers) -> Pending:
        """Copies the values to their range of `full`, cast if need be, and gathers the other ranges.

        Args:
            full, what, arriving: as for `Rest.all_gather`.
        """
        own = full[slice(*self.covers)].copy_(self.values)
        return gather(full, own, what=what)


class HostShard(DeviceShard):
    """A range of a flat buffer that rests in the host's memory."""

    tier = MemoryTier.HOST

    def allocate(self) -> None:
        self.values = self.transfer.bus.empty(self.numel, self.dtype, locked=self._locked)

    def copy_to(self, target: Tensor, values: Tensor) -> Pending:
        return self.transfer.up(target, values)

    def write(self, values: Tensor, covers: Range) -> Pending:
        self._part(covers).copy_(values)
        return Pending()

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None, gather: Gathers) -> Pending:
        own, bus = full[slice(*self.covers)], self.transfer.bus
        with bus.on_side_stream("up"):  # what computes meanwhile waits for neither copy nor collective
            transfer = bus.up(own, self.values) if arriving is None else arriving
            gathering = gather(full, own, what=what)

        def finish():
            transfer.wait()
            gathering.wait()

        return Pending(finish)


class DiskShard(HostShard):
    """A range of a flat buffer that rests on disk, whose pieces are windows."""

    tier = MemoryTier.DISK
    on_disk: "DiskTensor"

    def allocate(self) -> None:
        self.values = Placeholders(self.transfer.bus.host).of(torch.Size([self.numel]), self.dtype)

    def pieces(self, *, writes: bool, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        first = self.covers[0]
        within = None if only is None else (only[0] - first, only[1] - first)
        for start, values in self.on_disk.pieces(writes=writes, only=within):
            yield values, (first + start, first + start + values.numel())

    def cut(self, start: int, stop: int) -> list[Range]:
        first = self.covers[0]
        cuts = [(first + low, first + high) for low, high in self.on_disk.windows]
        return [(max(low, start), min(high, stop)) for low, high in cuts if low < stop and start < high]

    def write(self, values: Tensor, covers: Range) -> Pending:
        self.on_disk.write(covers[0] - self.covers[0], values)
        return Pending()


class SecondaryShard:
    """A range of a second copy of the whole values, which is divided over the ranks of one host: gathers from it do
    not leave the host (hpZ of ZeRO++, arXiv 2306.10209, section 3.2).

    Each gather over all ranks fills it, and it holds until the values change. Both follow from the order of gathers
    and updates, which all ranks share, so all agree on whether it holds.
    """

    def __init__(self, numel: int, dtype: torch.dtype, comm: Comm, host_group: Comm, transfer: HostTransfer):
        part = numel // host_group.num_ranks
        start = host_group.rank * part
        self.shard = DeviceShard((start, start + part), dtype, comm, transfer, locked=False)
        self.num_parts = host_group.num_ranks
        self.holds = False  # from where a gather begins that fills it
        self._gather = host_group.all_gather

    def all_gather(self, full: Tensor, what: str) -> Pending:
        """Gathers the values from the ranks of this host, see `Rest.all_gather`."""
        return self.shard.all_gather(full, what, None, self._gather)

    def filled_by(self, gathering: Pending, full: Tensor) -> Pending:
        """Returns a gather over all ranks that fills this rank's range too, once it is waited for. Who begins the next
        gather of this buffer has waited for it."""
        self.holds = True

        def finish() -> None:
            gathering.wait()
            self.shard.values.copy_(full[slice(*self.shard.covers)])

        return Pending(finish)


SHARDS = {shard.tier: shard for shard in (DeviceShard, HostShard, DiskShard)}
