"""Parameters that rest on disk: room for them in files, and reads ahead of the all-gathers that need them."""

from functools import partial

import torch

from hf_zero.comm import Bus, Pending
from hf_zero.config import MemoryTier
from hf_zero.engine.flat import Flat
from hf_zero.storage import NUM_BUFFERS, Disk, DiskTensor, Extent, windows


class DiskPrefetcher:
    """Reads this rank's ranges of one unit's buffers.

    Args:
        disk (`Disk`): whose few buffers in memory all units share.
        bus (`Bus`): the way to the device.
        flats (`list[Flat]`): the unit's buffers; those that do not rest on disk are left alone.
        in_windows (`bool`): a part after the other, where the unit may be too large to be in memory whole.
    """

    def __init__(self, disk: Disk, bus: Bus, flats: list[Flat], *, in_windows: bool):
        self._disk = disk
        self._bus = bus
        sources = [(flat, flat.source_on_disk.extent) for flat in flats if flat.source_on_disk is not None]
        whole = [(flat, 0, extent) for flat, extent in sources]
        parts = [
            [(flat, start, extent.window(start, stop))]
            for flat, extent in sources
            for start, stop in windows(extent.numel)
        ]
        self._records: list[list[tuple[Flat, int, Extent]]] = parts if in_windows else [whole]

    def prefetch(self) -> None:
        """Begins to read what the next `load` takes."""
        if self._records:
            self._disk.prefetch(_record(self._records[0]))

    def load(self) -> Pending:
        """Begins to copy the values to the device, from where they are gathered."""
        transfer = Pending()
        for position, parts in enumerate(self._records):
            record = _record(parts)
            tensors, uses = self._disk.load(record), []
            if position + 1 < len(self._records):
                self._disk.prefetch(_record(self._records[position + 1]))
            for (flat, start, extent), values in zip(parts, tensors):
                first = flat.owned[0] + start
                transfer = self._bus.up(flat.full[first : first + extent.numel], values)
                uses.append(Pending(transfer.synchronize))
            self._disk.release(record, writes=False, uses=uses)
        return transfer


def _record(parts: list[tuple[Flat, int, Extent]]) -> tuple[Extent, ...]:
    return tuple(extent for _, _, extent in parts)


def rest_on_disk(flats: list[Flat], folder: str, bus: Bus) -> None:
    """Takes room in files for the masters that rest there, and for compute copies that do."""
    masters = [flat for flat in flats if flat.master_at is MemoryTier.DISK]
    compute_shards = [flat for flat in masters if flat.has_compute_shard and flat.plan.compute_at is MemoryTier.DISK]
    if masters:
        comm = masters[0].comm
        num_buffers = NUM_BUFFERS + bool(compute_shards)  # one more, into which masters are cast
        make = partial(bus.empty, dtype=torch.uint8)
        disk = Disk.open(comm, folder, make, num_buffers=num_buffers)
        parts = [(flat.held[1] - flat.held[0], flat.master_dtype) for flat in masters]
        parts += [(flat.held[1] - flat.held[0], flat.dtype) for flat in compute_shards]
        extents = disk.extents(comm, parts)
        for flat, extent in zip(masters, extents):
            flat.on_disk = DiskTensor(disk, extent)
        for flat, extent in zip(compute_shards, extents[len(masters) :]):
            flat.compute_shard_on_disk = DiskTensor(disk, extent)
        disk.measure(comm)
