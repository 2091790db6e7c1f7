"""The layout of a flat buffer, as integers: where each parameter lies, and which range each rank owns; a sample of its
values, which shows that they have changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


# Parameters begin at multiples of so many elements: 64 bytes in fp32. Matrix kernels then see aligned operands, and
# the vectorised loops of fused optimizers never reach their scalar tails, whatever range of the buffer a rank owns.
ALIGN_NUMEL = 16

Range = tuple[int, int]  # [start, stop), counted in the buffer


def align(numel: int, to: int = ALIGN_NUMEL) -> int:
    """Rounds `numel` up to a multiple of `to`."""
    return -(-numel // to) * to


@dataclass(frozen=True)
class ParamSpan:
    """The elements [offset, offset + numel) of the flat buffer, which belong to one parameter."""

    offset: int
    numel: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class ParamSlice:
    """The elements of one parameter that lie inside a range of the buffer."""

    index: int  # which parameter
    start: int  # first element within the parameter
    offset: int  # first element within the range
    numel: int


@dataclass(frozen=True)
class Layout:
    """The layout of a flat buffer of parameters that share dtype and trainability.

    Padding stands between parameters and at the end, never inside one. All ranks own ranges of equal length. Where
    several ranks hold the same shard, each is responsible for an equal part of it: those parts are the shards of all
    ranks together.
    """

    spans: tuple[ParamSpan, ...]  # one per parameter, in order
    num_ranks: int  # over how many the buffer is divided
    num_replicas: int = 1  # how many ranks hold the same shard
    align_to: int = ALIGN_NUMEL  # parameters and the ranks' parts begin at multiples of so many elements

    @classmethod
    def of(
        cls, shapes: list[tuple[int, ...]], num_ranks: int, num_replicas: int = 1, align_to: int = ALIGN_NUMEL
    ) -> "Layout":
        """Lays parameters of these shapes one behind the other."""
        spans, offset = [], 0
        for shape in shapes:
            spans.append(ParamSpan(offset, prod(shape), tuple(shape)))
            offset = align(spans[-1].stop, align_to)
        return cls(tuple(spans), num_ranks, num_replicas, align_to)

    @cached_property
    def part_numel(self) -> int:
        """Elements for which each of the ranks that hold the same shard is responsible."""
        used = self.spans[-1].stop if self.spans else 0
        return align(-(-used // (self.num_ranks * self.num_replicas)), self.align_to) if used else 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements that each rank owns."""
        return self.part_numel * self.num_replicas

    @cached_property
    def full_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.num_ranks

    def owned(self, rank: int) -> tuple[int, int]:
        """The range [start, stop) that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def part(self, rank: int, replica: int) -> tuple[int, int]:
        """The range [start, stop) of the shard of `rank` for which one of its replicas is responsible."""
        start = rank * self.shard_numel + replica * self.part_numel
        return start, start + self.part_numel

    def owners_of(self, start: int, stop: int) -> range:
        """The ranks that own something of the range [start, stop)."""
        return range(start // self.shard_numel, -(-stop // self.shard_numel)) if start < stop else range(0)

    def param_slices(self, start: int, stop: int) -> Iterator[ParamSlice]:
        """The slices of parameters inside the range [start, stop), in order."""
        for index, span in enumerate(self.spans):
            low, high = max(span.offset, start), min(span.stop, stop)
            if low < high:
                yield ParamSlice(index, low - span.offset, low - start, high - low)

    def pads(self) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) that belong to no parameter."""
        end = 0
        for span in self.spans:
            if span.offset > end:
                yield end, span.offset
            end = span.stop
        if self.full_numel > end:
            yield end, self.full_numel


# A sample of a buffer has so many elements of each parameter, all of those that have fewer.
SAMPLE_NUMEL = 64
# Multiples of the golden ratio, without their integer parts, fill [0, 1) evenly and fall into no period of a matrix.
_RATIO = (5**0.5 - 1) / 2
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sample:
    """A fixed number of elements of each part of a 1-D buffer, of which a checksum is taken.

    A whole tensor that gets other values is noticed, one element is not. The number of operators does not depend on
    the size of the buffer.

    Args:
        parts (`list` of `(start, stop)`): the ranges of the buffer from which elements are taken.
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
        # odd, and another one at each place, so that values that change places change the sum
        self._index, self._weights = index.to(device), (2 * torch.arange(len(index)) + 1).to(device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._index, self._weights]

    def sum_of(self, values: Tensor) -> Tensor:
        """Returns the checksum of a buffer, a 0-d int64 tensor on the same device."""
        bits = values.detach().view(_INTS[values.element_size()])
        return bits.index_select(0, self._index).mul(self._weights).sum()
