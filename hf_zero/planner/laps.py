"""The most that is held between the moments of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hf_zero.config import MemoryTier
from hf_zero.engine.away import in_backward
from hf_zero.engine.hooks import tensors_in
from hf_zero.planner.meter import Meter


# As many blocks at either end of a pass are looked at apart: buffers that take turns are two.
NUM_EDGE = 3


class PeakRecorder:
    """Records the bytes that are held when the last block's forward ends, and the peaks between the moments of a step.

    Args:
        meter (`Meter`): counts.
    """

    def __init__(self, meter: Meter):
        self._meter = meter
        self._handles: list = []
        self._begin = self._at_end_of_blocks = meter.held[MemoryTier.DEVICE]
        self._laps: list[tuple[str, int]] = []
        self._last: nn.Module | None = None  # whose backward was come to last
        self._is_paused = False
        meter.reset_peak()

    @property
    def activations(self) -> int:
        return self._at_end_of_blocks - self._begin

    @property
    def head(self) -> int:
        """The most bytes that are added until backward comes to the last block."""
        return max((nbytes for name, nbytes in self._laps if name == "head"), default=0) - self._at_end_of_blocks

    def moments(self) -> dict[str, int]:
        """The laps by name. Of the laps that each block has, only the first and the last few are given."""
        found: dict[str, int] = {}
        for kind in dict.fromkeys(name for name, _ in self._laps):
            own = [nbytes for name, nbytes in self._laps if name == kind]
            found.update({f"{kind} {index}": nbytes for index, nbytes in enumerate(own[:NUM_EDGE])})
            found.update({f"{kind} -{index}": nbytes for index, nbytes in enumerate(own[: -NUM_EDGE - 1 : -1])})
        return found

    def follow(self, block: nn.Module) -> None:
        self._handles.append(block.register_forward_hook(self._after_block))

    def lap(self, name: str) -> None:
        """Records the peak since the last lap."""
        self._laps.append((name, self._meter.peak[MemoryTier.DEVICE]))
        self._meter.peak[MemoryTier.DEVICE] = self._meter.held[MemoryTier.DEVICE]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Looks at no block inside: a pass of the reference is one lap."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _after_block(self, module, _args, output) -> None:
        if self._is_paused or in_backward():
            return
        self.lap("block")
        self._at_end_of_blocks = self._meter.held[MemoryTier.DEVICE]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(module))

    def _before_backward(self, module: nn.Module) -> None:
        if module is not self._last:
            self.lap("head" if self._last is None else "block's backward")
            self._last = module

    def end(self) -> None:
        self.lap("update")
        for handle in self._handles:
            handle.remove()
