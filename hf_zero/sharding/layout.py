"""The layout of a flat buffer, in integers: the offset of each parameter and the range that each rank owns. Also a
sampled checksum that detects changed values."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


# Parameters start at multiples of this: 64 bytes in fp32. Matrix kernels then see aligned operands, and the vectorized
# loops of fused optimizers never reach their scalar tails, for any range of the buffer that a rank owns.
ALIGN_NUMEL = 16

Range = tuple[int, int]  # [start, stop), offsets in the buffer


def align(numel: int, to: int = ALIGN_NUMEL) -> int:
    """Rounds `numel` up to a multiple of `to`."""
    return -(-numel // to) * to


@dataclass(frozen=True)
class ParamSpan:
    """The elements [offset, offset + numel) of the flat buffer that belong to one parameter."""

    offset: int
    numel: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class ParamSlice:
    """The elements of one parameter within a range of the buffer."""

    index: int  # of the parameter
    start: int  # first element within the parameter
    offset: int  # first element within the range
    numel: int


@dataclass(frozen=True)
class Layout:
    """The layout of a flat buffer of parameters with the same dtype and trainability.

    Padding is between parameters and at the end, never inside a parameter. All ranks own ranges of equal length. If
    several ranks hold the same shard, it is divided equally among them for tasks that each element needs only once:
    these parts together cover the buffer without overlap.
    """

    spans: tuple[ParamSpan, ...]  # one per parameter, in order
    num_ranks: int  # that shard the buffer
    num_replicas: int = 1  # ranks that hold the same shard
    align_to: int = ALIGN_NUMEL  # parameters and the ranks' parts start at multiples of this

    @classmethod
    def of(
        cls, shapes: list[tuple[int, ...]], num_ranks: int, num_replicas: int = 1, align_to: int = ALIGN_NUMEL
    ) -> "Layout":
        """Lays out parameters of these shapes consecutively."""
        spans, offset = [], 0
        for shape in shapes:
            spans.append(ParamSpan(offset, prod(shape), tuple(shape)))
            offset = align(spans[-1].stop, align_to)
        return cls(tuple(spans), num_ranks, num_replicas, align_to)

    @cached_property
    def part_numel(self) -> int:
        """Number of elements in the part of each replica of a shard."""
        used = self.spans[-1].stop if self.spans else 0
        return align(-(-used // (self.num_ranks * self.num_replicas)), self.align_to) if used else 0

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements in each rank's shard."""
        return self.part_numel * self.num_replicas

    @cached_property
    def full_numel(self) -> int:
        """Number of elements in the buffer, including padding."""
        return self.shard_numel * self.num_ranks

    def owned(self, rank: int) -> tuple[int, int]:
        """The range [start, stop) that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def part(self, rank: int, replica: int) -> tuple[int, int]:
        """The range [start, stop) of the part of one replica of the shard of `rank`."""
        start = rank * self.shard_numel + replica * self.part_numel
        return start, start + self.part_numel

    def owners_of(self, start: int, stop: int) -> range:
        """The ranks that own elements of the range [start, stop)."""
        return range(start // self.shard_numel, -(-stop // self.shard_numel)) if start < stop else range(0)

    def param_slices(self, start: int, stop: int) -> Iterator[ParamSlice]:
        """Yields the slices of parameters within the range [start, stop), in order."""
        for index, span in enumerate(self.spans):
            low, high = max(span.offset, start), min(span.stop, stop)
            if low < high:
                yield ParamSlice(index, low - span.offset, low - start, high - low)

    def views(self, full: Tensor) -> list[Tensor]:
        """Returns the parameters' views of the whole buffer, in their shapes."""
        return [full.narrow(0, span.offset, span.numel).view(span.shape) for span in self.spans]

    def pads(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges [start, stop) that belong to no parameter."""
        end = 0
        for span in self.spans:
            if span.offset > end:
                yield end, span.offset
            end = span.stop
        if self.full_numel > end:
            yield end, self.full_numel


# Number of elements that are sampled from each parameter; smaller parameters are sampled completely.
SAMPLE_NUMEL = 64
# The fractional parts of multiples of the golden ratio fill [0, 1) evenly and never align with the period of a matrix.
_RATIO = (5**0.5 - 1) / 2
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sample:
    """A checksum over a fixed number of elements from each part of a 1-D buffer.

    It detects that a tensor was overwritten, but not that a single element has changed. The number of operations does
    not depend on the size of the buffer.

    Args:
        parts (`list` of `(start, stop)`): the ranges of the buffer to sample.
    """

    def __init__(self, parts: list[Range], device: torch.device):
        places = [torch.zeros(0, dtype=torch.int64)]
        for start, stop in parts:
            count = min(stop - start, SAMPLE_NUMEL)
            if count == stop - start:
                places.append(torch.arange(start, stop))
            else:
                fractions = torch.arange(count, dtype=torch.float64).mul(_RATIO).frac()
                places.append(start + fractions.mul(stop - start).long())
        index = torch.cat(places)
        # odd and different at every position, so that the checksum changes if values are swapped
        self._index, self._weights = index.to(device), (2 * torch.arange(len(index)) + 1).to(device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._index, self._weights]

    def sum_of(self, values: Tensor) -> Tensor:
        """Returns the checksum of a buffer, a 0-d int64 tensor on the same device."""
        bits = values.detach().view(_INTS[values.element_size()])
        return bits.index_select(0, self._index).mul(self._weights).sum()
