"""One rank's shard of a flat buffer, on the device, on the host or on disk, and its copies between host and device."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Bus, Comm, Pending
from hf_zero.comm.base import DONE
from hf_zero.config import MemoryTier
from hf_zero.engine.away import Placeholders
from hf_zero.sharding.layout import Range


if TYPE_CHECKING:
    from hf_zero.storage import DiskTensor


# Transfers that cast or accumulate go through at least NUM_PIECES page-locked staging buffers of PIECE_NBYTES.
PIECE_NBYTES = 16 * 2**20
NUM_PIECES = 8
MAX_HELD_NBYTES = 2**30  # of staging buffers for gradients


class Ring:
    """A ring of reusable buffers. `take` waits until the previous use of a buffer has ended. `make` allocates a 1-D
    uint8 tensor of the given size."""

    def __init__(self, make: Callable[[int], Tensor], num_buffers: int):
        self._make = make
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._uses: list[Pending | None] = [None] * num_buffers
        self._last = -1

    @property
    def nbytes(self) -> int:
        """The total size of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the first `numel` elements of the next buffer, 1-D. Replaces a buffer that is too small."""
        self._last = (self._last + 1) % len(self._buffers)
        use, self._uses[self._last] = self._uses[self._last], None
        if use is not None:
            use.wait()
        nbytes, buffer = numel * dtype.itemsize, self._buffers[self._last]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[self._last] = None  # freed before the larger one is allocated
            buffer = self._buffers[self._last] = self._make(nbytes)
        return buffer[:nbytes].view(dtype)

    def hold(self, use: Pending) -> None:
        """Records the work that uses the last buffer taken."""
        self._uses[self._last] = use


class HostTransfer:
    """Copies shards between host and device through staging buffers of constant size. Those for gradients hold
    `held_nbytes`, so that backward goes on while the host casts the gradients of a unit."""

    def __init__(self, bus: Bus, piece_nbytes: int = PIECE_NBYTES, *, held_nbytes: int = 0):
        self.bus = bus
        self._piece_nbytes = piece_nbytes
        num_down = max(NUM_PIECES, -(-held_nbytes // piece_nbytes))
        self._going_down = Ring(lambda nbytes: bus.empty(nbytes, torch.uint8), num_down)
        self._going_up = Ring(lambda nbytes: bus.empty(nbytes, torch.uint8), NUM_PIECES)

    @property
    def nbytes(self) -> int:
        """The total size of the staging buffers on the host."""
        return self._going_down.nbytes + self._going_up.nbytes

    def up(self, device: Tensor, host: Tensor) -> Pending:
        """Copies a shard to the device and casts it if the dtypes differ.

        Args:
            device (`Tensor`): 1-D; valid after `wait` on the returned object.
            host (`Tensor`): 1-D, of any dtype. If it is cast, it may be overwritten when this method returns,
                otherwise after `Bus.synchronize`.
        """
        if host.dtype is device.dtype:
            return self.bus.up(device, host)
        transfer = DONE
        for part in self._parts(device):
            staged = self._going_up.take(part.stop - part.start, device.dtype).copy_(host[part])
            transfer = self.bus.up(device[part], staged)
            self._going_up.hold(Pending(transfer.synchronize))
        return transfer  # of the last part: copies in one direction complete in order

    def down(self, host: Tensor, device: Tensor, *, accumulate: bool) -> Pending:
        """Copies values to a shard on the host, or adds them to it.

        Args:
            host (`Tensor`): 1-D, of any dtype; valid after `Bus.wait_for_jobs`.
            device (`Tensor`): 1-D; may be overwritten after `wait` on the returned object.
            accumulate (`bool`): add instead of copy.
        """
        if host.dtype is device.dtype and not accumulate:
            whole = self.bus.down(host, device)
            self.bus.later(whole.synchronize)
            return whole
        last = DONE
        for part in self._parts(device):
            staged = self._going_down.take(part.stop - part.start, device.dtype)
            last = transfer = self.bus.down(staged, device[part])
            self._going_down.hold(self.bus.later(_taking_over(transfer, staged, host[part], accumulate)))
        return last

    def _parts(self, tensor: Tensor) -> list[slice]:
        step = max(1, self._piece_nbytes // tensor.element_size())
        return [slice(start, min(start + step, tensor.numel())) for start in range(0, tensor.numel(), step)]


def _taking_over(transfer, staged: Tensor, host: Tensor, accumulate: bool) -> Callable[[], None]:
    def take_over():
        transfer.synchronize()
        host.add_(staged) if accumulate else host.copy_(staged)

    return take_over


class Shard:
    """One rank's range of a flat buffer, in device memory, in host memory or on disk. A range on disk is read and
    written in the windows of its `DiskTensor`.

    Args:
        covers (`Range`): the range of the buffer.
        dtype (`torch.dtype`): dtype of the values.
        tier (`MemoryTier`): where they are stored.
    """

    on_disk: "DiskTensor | None" = None  # the values on disk (`values` reads NaN then); None: they are in memory
    values: Tensor  # 1-D
    is_locked = True  # whether host memory is page-locked

    def __init__(self, covers: Range, dtype: torch.dtype, tier: MemoryTier, comm: Comm, transfer: HostTransfer):
        self.covers = covers
        self.numel = covers[1] - covers[0]
        self.dtype = dtype
        self.tier = tier
        self._device = comm.device
        self.transfer = transfer

    def allocate(self) -> None:
        """Allocates memory for the values, filled with zeros."""
        bus = self.transfer.bus
        if self.tier is MemoryTier.DEVICE:
            self.values = torch.zeros(self.numel, dtype=self.dtype, device=self._device)
        elif self.tier is MemoryTier.HOST:
            self.values = bus.empty(self.numel, self.dtype, locked=self.is_locked)
        else:
            self.values = Placeholders(bus.host).of(torch.Size([self.numel]), self.dtype)

    def pieces(self, *, writes: bool, only: Range | None = None) -> Iterator[tuple[Tensor, Range]]:
        """Yields the values with the range that they cover: all at once, or, from disk, one window after the other.

        Args:
            writes (`bool`): keep what the caller writes to the pieces.
            only (`Range`, *optional*): yield only the windows that overlap this range of the buffer.
        """
        if self.on_disk is None:
            yield self.values, self.covers
            return
        first = self.covers[0]
        within = None if only is None else (only[0] - first, only[1] - first)
        for start, values in self.on_disk.pieces(writes=writes, only=within):
            yield values, (first + start, first + start + values.numel())

    def cut(self, start: int, stop: int) -> list[Range]:
        """Splits the range from `start` to `stop` at the boundaries of the pieces."""
        if self.on_disk is None:
            return [(start, stop)]
        first = self.covers[0]
        cuts = [(first + window.start, first + window.stop) for window in self.on_disk.windows]
        return [(max(low, start), min(high, stop)) for low, high in cuts if low < stop and start < high]

    def copy_to(self, target: Tensor, values: Tensor) -> Pending:
        """Copies a piece to the device. The piece may be overwritten after `Bus.synchronize`."""
        if self.tier is not MemoryTier.DEVICE:
            return self.transfer.up(target, values)
        target.copy_(values)
        return DONE

    def write(self, values: Tensor, covers: Range) -> Pending:
        """Overwrites a range with `values` on the host. `values` may be overwritten after `Bus.synchronize`."""
        start, stop = covers[0] - self.covers[0], covers[1] - self.covers[0]
        if self.tier is MemoryTier.DEVICE:
            return self.transfer.up(self.values[start:stop], values)
        if self.on_disk is not None:
            self.on_disk.write(start, values)
        else:
            self.values[start:stop].copy_(values)
        return DONE

    def all_gather(self, full: Tensor, what: str, arriving: Pending | None, gather: Callable[..., Pending]) -> Pending:
        """Copies the values to their range of `full`, casting them if the dtypes differ, and gathers the ranges of all
        ranks with the collective `gather`. `arriving`: the pending copy of values on disk."""
        own = full[slice(*self.covers)]
        if self.tier is MemoryTier.DEVICE:
            return gather(full, own.copy_(self.values), what=what)
        bus = self.transfer.bus
        with bus.on_side_stream("up"):  # the compute stream waits for neither copy nor collective
            transfer = bus.up(own, self.values) if arriving is None else arriving
            gathering = gather(full, own, what=what)

        def finish():
            transfer.wait()
            gathering.wait()

        return Pending(finish)
