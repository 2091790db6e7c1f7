"""The content of a foreign checkpoint of any format: whole tensors by name, each in pieces that lie in files."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_zero.checkpoint.strided import Copy, Dim, contiguous_strides, within
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a flattened tensor.

    Args:
        start (`int`): first element, counted in the whole tensor.
        numel (`int`): how many.
        read (`Callable[[int, int], Tensor]`): elements [first, last) of the piece, 1-D; reads no more than it must.
    """

    start: int
    numel: int
    read: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    A part that is not as wide as the tensor lies in as many places of the flattened one as it has rows, which may be
    millions. So the box is kept, and cut only where it is read.

    Args:
        offsets (`tuple[int, ...]`): its first element, by dimension.
        sizes (`tuple[int, ...]`): how many, by dimension.
        load (`Callable[[], Tensor]`): reads all of it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def read_into(self, shape: tuple[int, ...], start: int, out: Tensor) -> None:
        """Fills those of elements [start, start + out.numel()) of a flattened tensor of that shape that lie in it."""
        whole, own = contiguous_strides(shape), contiguous_strides(self.sizes)
        first = sum(map(operator.mul, self.offsets, whole))
        last = first + sum((size - 1) * stride for size, stride in zip(self.sizes, whole))
        if not self.numel or not out.numel() or last < start or first >= start + out.numel():
            return
        dims = tuple(Dim(*dim) for dim in zip(self.sizes, whole, own) if dim[0] > 1)
        values = None  # until it is known that it is needed
        for part in within(Copy("", first, 0, dims), start, start + out.numel()):
            values = self.load().reshape(-1) if values is None else values
            sizes = [dim.size for dim in part.dims]
            read = values.as_strided(sizes, [dim.target for dim in part.dims], values.storage_offset() + part.target)
            step = out.stride(0)
            target = [dim.source * step for dim in part.dims]
            out.as_strided(sizes, target, out.storage_offset() + (part.source - start) * step).copy_(read)


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a checkpoint: its shape, and the pieces, or else the boxes, that tile it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    boxes: tuple[Box, ...] = ()

    @classmethod
    def build(cls, name: str, shape: Iterable[int], pieces: Iterable[Piece]) -> "ForeignTensor":
        """Checks that the pieces tile the tensor.

        Raises:
            `CheckpointError`: naming the tensor and where a part of it is missing.
        """
        shape = tuple(int(size) for size in shape)
        ordered = sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.start)
        numel, reached = math.prod(shape), 0
        for piece in ordered:
            if piece.start != reached:
                break
            reached += piece.numel
        if reached != numel:
            raise CheckpointError(
                f"{name}: its pieces in the files reach element {reached}, its shape {list(shape)} has {numel}; "
                "the checkpoint is incomplete, copy all of its files"
            )
        return cls(shape, tuple(ordered))

    @classmethod
    def of_boxes(cls, name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> "ForeignTensor":
        """Checks that the boxes, which lie in the tensor, tile it. Raises as `build`."""
        boxes = tuple(box for box in boxes if box.numel)
        numel, found = math.prod(shape), sum(box.numel for box in boxes)
        if found != numel or _overlap(boxes, len(shape)):
            raise CheckpointError(
                f"{name}: its parts in the files overlap, or have {found} elements, its shape {list(shape)} {numel}; "
                "the checkpoint is incomplete, copy all of its files"
            )
        return cls(shape, boxes=boxes)

    @classmethod
    def of(cls, tensor: Tensor) -> "ForeignTensor":
        """Makes one of a tensor that lies whole in one file, mapped and not read."""
        return cls(tuple(tensor.shape), (Piece(0, tensor.numel(), window_of(tensor)),))

    def read_range(self, start: int, out: Tensor) -> None:
        """Fills `out`, 1-D, with elements [start, start + out.numel()), converted to its dtype."""
        stop = start + out.numel()
        for piece in self.pieces:
            first, last = max(start, piece.start), min(stop, piece.start + piece.numel)
            if first < last:
                out[first - start : last - start].copy_(piece.read(first - piece.start, last - piece.start))
        for box in self.boxes:
            box.read_into(self.shape, start, out)


@dataclass
class ForeignState:
    """An optimizer's state by parameter name.

    Args:
        tensors (`dict`): {parameter: {state key: tensor of the parameter's shape}}.
        numbers (`dict`): {parameter: {state key: number}}; every parameter that has state has an entry.
        settings (`dict`): {parameter: hyperparameters of its group}.
    """

    tensors: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, dict] = field(default_factory=dict)

    def put(self, name: str, key: str, value: ForeignTensor | float | None) -> None:
        numbers = self.numbers.setdefault(name, {})
        if isinstance(value, ForeignTensor):
            self.tensors.setdefault(name, {})[key] = value
        elif value is not None:
            numbers[key] = float(value)


def _overlap(boxes: Sequence[Box], num_dims: int) -> bool:
    """Whether two of the boxes, none of them empty, have an element in common."""
    if num_dims == 0:
        return len(boxes) > 1
    low = torch.tensor([box.offsets for box in boxes], dtype=torch.int64).view(len(boxes), num_dims)
    high = low + torch.tensor([box.sizes for box in boxes], dtype=torch.int64).view(len(boxes), num_dims)
    return any(
        bool(((low[at] < high[at + 1 :]) & (low[at + 1 :] < high[at])).all(dim=1).any()) for at in range(len(boxes))
    )


def window_of(tensor: Tensor) -> Callable[[int, int], Tensor]:
    """Returns a function that reads ranges of a mapped tensor, which may have strides."""
    flat = tensor.detach().reshape(-1)  # a view where the tensor is contiguous, as saved tensors nearly always are
    return lambda first, last: flat[first:last]


def pieces_of(parts: Sequence[Tensor], offset: int, numel: int, *, start: int = 0) -> Iterator[Piece]:
    """Elements [offset, offset + numel) of 1-D tensors laid one behind the other.

    Args:
        parts (`Sequence[Tensor]`): the tensors.
        offset (`int`): counted over all of them.
        numel (`int`): how many elements.
        start (`int`): where the first of them lies in the tensor that is put together.
    """
    passed = 0
    for part in parts:
        first, last = max(offset, passed), min(offset + numel, passed + part.numel())
        if first < last:
            yield Piece(start + first - offset, last - first, window_of(part[first - passed : last - passed]))
        passed += part.numel()
