"""The content of a foreign checkpoint of any format: tensors by name, each in parts that lie in files."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor, or a part of a flattened one.

    A part that is not as wide as the tensor lies in as many places of the flattened one as it has rows, which may be
    millions. So the box is kept, and cut only where it is read.
    """

    offsets: tuple[int, ...]  # of its first element, by dimension
    sizes: tuple[int, ...]
    load: Callable[[], Tensor]  # reads all of it, or gives a mapped tensor, of which only what is used is read

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def read_into(self, shape: tuple[int, ...], start: int, out: Tensor) -> None:
        """Fills the elements of `out` that lie in the box. `out` is elements [start, start + out.numel()) of the
        flattened tensor."""
        values, position = None, 0  # not loaded until it is known that it is needed
        for slab in slabs(shape, start, start + out.numel()):
            sizes = [stop - first for first, stop in slab]
            part = out[position : position + math.prod(sizes)].view(sizes)
            position += part.numel()
            bounds = [
                (max(first, own), min(stop, own + size))
                for (first, stop), own, size in zip(slab, self.offsets, self.sizes)
            ]
            if all(first < stop for first, stop in bounds):
                values = self.load().view(self.sizes) if values is None else values
                inside = tuple(slice(first - at, stop - at) for (first, stop), (at, _) in zip(bounds, slab))
                found = tuple(slice(first - at, stop - at) for (first, stop), at in zip(bounds, self.offsets))
                part[inside].copy_(values[found])


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields the rectangles that together are elements [start, stop) of a flattened tensor, at most two for each
    dimension: for each dimension, the first index and the one behind the last."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if start % row or first == last:  # begins in the middle of a row, or is a part of one
        for inner in slabs(shape[1:], start - first * row, min(stop - first * row, row)):
            yield ((first, first + 1), *inner)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if first <= last:
        for inner in slabs(shape[1:], 0, stop - last * row):
            yield ((last, last + 1), *inner)


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]  # the shape in which the boxes count: the tensor's, or that of the flattened one
    boxes: tuple[Box, ...]  # they tile it

    @classmethod
    def build(cls, name: str, shape: Iterable[int], boxes: Iterable[Box], *, is_flat: bool) -> "ForeignTensor":
        """Makes a tensor of boxes, and checks that they tile it; where it `is_flat`, that they tile the flattened
        tensor. Raises [`CheckpointError`] with the tensor of which a part is missing."""
        shape, boxes = tuple(int(size) for size in shape), tuple(box for box in boxes if box.numel)
        numel, found = math.prod(shape), sum(box.numel for box in boxes)
        grid = (numel,) if is_flat else shape
        if found != numel or _overlap(boxes, len(grid)):
            raise CheckpointError(
                f"{name}: its parts in the files overlap, or have {found} elements, its shape {list(shape)} {numel}; "
                "the checkpoint is incomplete, copy all of its files"
            )
        return cls(shape, grid, boxes)

    @classmethod
    def of(cls, tensor: Tensor) -> "ForeignTensor":
        """Makes a `ForeignTensor` of a tensor that lies whole in one file, mapped and not read."""
        flat = tensor.detach().reshape(-1)  # a view where the tensor is contiguous, as saved tensors nearly always are
        return cls(tuple(tensor.shape), (flat.numel(),), (Box((0,), (flat.numel(),), flat.detach),))

    def read_range(self, start: int, out: Tensor) -> None:
        """Fills `out`, 1-D, with elements [start, start + out.numel()), converted to its dtype."""
        for box in self.boxes:
            box.read_into(self.grid, start, out)


@dataclass
class ForeignState:
    """An optimizer's state by parameter name, then by state key."""

    tensors: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)  # of the parameter's shape
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # of every parameter that has state
    settings: dict[str, dict] = field(default_factory=dict)  # the hyperparameters of its group

    def put(self, name: str, key: str, value: ForeignTensor | float | None) -> None:
        numbers = self.numbers.setdefault(name, {})
        if isinstance(value, ForeignTensor):
            self.tensors.setdefault(name, {})[key] = value
        elif value is not None:
            numbers[key] = float(value)


def _overlap(boxes: Sequence[Box], num_dims: int) -> bool:
    """Whether any two of the boxes have an element in common. None of them is empty."""
    if num_dims == 0:
        return len(boxes) > 1
    low = torch.tensor([box.offsets for box in boxes], dtype=torch.int64).view(len(boxes), num_dims)
    high = low + torch.tensor([box.sizes for box in boxes], dtype=torch.int64).view(len(boxes), num_dims)
    return any(
        bool(((low[at] < high[at + 1 :]) & (low[at + 1 :] < high[at])).all(dim=1).any()) for at in range(len(boxes))
    )


def boxes_of(parts: Sequence[Tensor], offset: int, numel: int, *, start: int = 0) -> Iterator[Box]:
    """Yields boxes for elements [offset, offset + numel) of mapped 1-D tensors that lie one behind the other, counted
    over all of them. The first lies at `start` in the tensor that is put together."""
    passed = 0
    for part in parts:
        first, last = max(offset, passed), min(offset + numel, passed + part.numel())
        if first < last:
            values = part[first - passed : last - passed]
            yield Box((start + first - offset,), (last - first,), values.detach)
        passed += part.numel()
