"""Integers only: where each parameter lies in a flat buffer, and which range of it each rank owns."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


# Parameters begin at multiples of so many elements: 64 bytes in fp32. Matrix kernels then see aligned operands, and
# the vectorised loops of fused optimizers never reach their scalar tails, whatever range of the buffer a rank owns.
ALIGN_NUMEL = 16


def align(numel: int, to: int = ALIGN_NUMEL) -> int:
    """`numel` rounded up to a multiple of `to`."""
    return -(-numel // to) * to


@dataclass(frozen=True)
class Place:
    """Where one parameter lies: elements [offset, offset + numel) of the flat buffer."""

    offset: int
    numel: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """A run of one parameter inside a range of the buffer."""

    index: int  # which parameter
    start: int  # first element within the parameter
    offset: int  # first element within the range
    numel: int


@dataclass(frozen=True)
class Layout:
    """The flat buffer of parameters that share dtype and trainability.

    Padding stands between parameters and at the end, never inside one. All ranks own ranges of equal length.

    Args:
        places (`tuple[Place, ...]`): one per parameter, in order.
        num_ranks (`int`): over how many ranks the buffer is divided.
    """

    places: tuple[Place, ...]
    num_ranks: int

    @classmethod
    def of(cls, shapes: list[tuple[int, ...]], num_ranks: int) -> "Layout":
        """Lays parameters of these shapes one behind the other."""
        places, offset = [], 0
        for shape in shapes:
            places.append(Place(offset, prod(shape), tuple(shape)))
            offset = align(places[-1].stop)
        return cls(tuple(places), num_ranks)

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns."""
        used = self.places[-1].stop if self.places else 0
        return align(-(-used // self.num_ranks)) if used else 0

    @property
    def full_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.num_ranks

    def owned(self, rank: int) -> tuple[int, int]:
        """The range [start, stop) that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The runs of parameters inside the range [start, stop), in order."""
        for index, place in enumerate(self.places):
            low, high = max(place.offset, start), min(place.stop, stop)
            if low < high:
                yield Piece(index, low - place.offset, low - start, high - low)

    def pads(self) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) that belong to no parameter."""
        end = 0
        for place in self.places:
            if place.offset > end:
                yield end, place.offset
            end = place.stop
        if self.full_numel > end:
            yield end, self.full_numel
