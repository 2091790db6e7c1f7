"""Transfers of shards from the host to the device, and of gradients the other way, through few buffers."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.comm import Bus, Pending


# Values that change their dtype on the way, or are added up on the host, go through page-locked buffers of so many
# bytes. So many of them hold what a backward produces while the host is busy with an update.
PIECE_NBYTES = 16 * 2**20
NUM_PIECES = 8


class Ring:
    """A few buffers that are filled in turn. Taking one waits until its last use is over.

    Args:
        make (`Callable`): gives memory, 1-D uint8, of so many bytes.
    """

    def __init__(self, make: Callable[[int], Tensor], num_buffers: int):
        self._make = make
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._uses: list[Pending | None] = [None] * num_buffers
        self._last = -1

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the first elements of the next buffer, 1-D. A buffer that is too small is replaced."""
        self._last = (self._last + 1) % len(self._buffers)
        use, self._uses[self._last] = self._uses[self._last], None
        if use is not None:
            use.wait()
        nbytes, buffer = numel * dtype.itemsize, self._buffers[self._last]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[self._last] = None  # given back before the larger one is made
            buffer = self._buffers[self._last] = self._make(nbytes)
        return buffer[:nbytes].view(dtype)

    def hold(self, use: Pending) -> None:
        """Notes the work that uses the buffer that was taken last."""
        self._uses[self._last] = use


class HostTransfer:
    """Moves shards between host and device through buffers of constant size."""

    def __init__(self, bus: Bus, piece_nbytes: int = PIECE_NBYTES):
        self.bus = bus
        self._piece_nbytes = piece_nbytes
        self._going_down = Ring(lambda nbytes: bus.empty(nbytes, torch.uint8), NUM_PIECES)
        self._going_up = Ring(lambda nbytes: bus.empty(nbytes, torch.uint8), NUM_PIECES)

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers on the host."""
        return self._going_down.nbytes + self._going_up.nbytes

    def up(self, device: Tensor, host: Tensor) -> Pending:
        """Copies a shard to the device, and casts it where the dtypes differ. The host's values may be overwritten
        after a `Bus.synchronize`; those that are cast, when this returns.

        Args:
            device (`Tensor`): 1-D, overwritten; to be read after a `wait`.
            host (`Tensor`): 1-D, of any dtype.
        """
        if host.dtype is device.dtype:
            return self.bus.up(device, host)
        transfer = Pending()
        for part in self._parts(device):
            staged = self._going_up.take(part.stop - part.start, device.dtype).copy_(host[part])
            transfer = self.bus.up(device[part], staged)
            self._going_up.hold(Pending(transfer.synchronize))
        return transfer  # of the last part: copies of one way are made in their order

    def down(self, host: Tensor, device: Tensor, *, accumulate: bool) -> Pending:
        """Copies values to a shard on the host, or adds them. The shard is complete after a `Bus.wait_for_jobs`.

        Args:
            host (`Tensor`): 1-D, of any dtype.
            device (`Tensor`): 1-D; to be overwritten after a `wait`.
        """
        if host.dtype is device.dtype and not accumulate:
            whole = self.bus.down(host, device)
            self.bus.later(whole.synchronize)
            return whole
        last = Pending()
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
