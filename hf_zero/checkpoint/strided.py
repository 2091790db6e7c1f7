"""Integers only: rectangular copies between two flat tensors, composed with one another and cut at ranges.

A reordering of elements (a chunk, a stack of experts, a transpose, a permutation of heads) is a few such copies,
however many elements it moves. Nothing here reads or allocates a tensor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod


class Unaligned(Exception):
    """Two geometries that have no common grid: what they share is not a few rectangles."""


@dataclass(frozen=True)
class Dim:
    """One loop of a copy: `size` steps, each so many elements on in the source and in the target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class Copy:
    """A rectangle of elements that go from one flat tensor to another.

    Args:
        name (`str`): the source tensor.
        source (`int`): first element read, in the flattened source.
        target (`int`): first element written, in the flattened target.
        dims (`tuple[Dim, ...]`): the loops, in any order; none for a single element.
    """

    name: str
    source: int
    target: int
    dims: tuple[Dim, ...]

    @property
    def numel(self) -> int:
        return prod(dim.size for dim in self.dims)


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie row by row."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Merges loops into as few as possible, the largest steps of the target first."""
    found: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.size != 1), key=lambda dim: (dim.target, dim.source), reverse=True):
        outer = found[-1] if found else None
        if outer and (outer.source, outer.target) == (dim.size * dim.source, dim.size * dim.target):
            found[-1] = Dim(outer.size * dim.size, dim.source, dim.target)
        else:
            found.append(dim)
    return tuple(found)


def compose(inner: Copy, outer: Copy) -> Copy | None:
    """Composes two copies: from the source of `inner`, whose target is what `outer` reads, to the target of `outer`.

    Raises:
        `Unaligned`: when that is no single rectangle.
    """
    if not inner.numel or not outer.numel:
        return None
    steps = sorted({1} | {dim.target for dim in inner.dims} | {dim.source for dim in outer.dims})
    if steps[0] < 1 or any(wide % narrow for narrow, wide in zip(steps, steps[1:])):
        raise Unaligned
    written = _digits(inner.target, ((dim.size, dim.target, dim.source) for dim in inner.dims), steps)
    read = _digits(outer.source, ((dim.size, dim.source, dim.target) for dim in outer.dims), steps)
    source, target, dims = inner.source, outer.target, []
    for (low_in, size_in, step_in), (low_out, size_out, step_out) in zip(written, read):
        low, high = max(low_in, low_out), min(low_in + size_in, low_out + size_out)
        if low >= high:
            return None
        source += (low - low_in) * step_in
        target += (low - low_out) * step_out
        dims.append(Dim(high - low, step_in, step_out))
    return Copy(inner.name, source, target, merged(dims))


def _digits(offset: int, dims: Iterable[tuple[int, int, int]], steps: list[int]) -> list[list[int]]:
    """Loops of (size, step, step elsewhere) as one interval per step: (low, size, step elsewhere)."""
    radices = [wide // narrow for narrow, wide in zip(steps, steps[1:])] + [None]
    digits = []
    for radix in radices:
        offset, low = divmod(offset, radix) if radix else (0, offset)
        digits.append([low, 1, 0])
    for size, step, elsewhere in dims:
        index = steps.index(step)
        while size > 1:
            low, taken, _ = digits[index]
            radix = radices[index]
            if taken != 1:
                raise Unaligned  # two loops over the same digit
            here = size if radix is None or size <= radix else radix
            if (radix is not None and low + here > radix) or size % here:
                raise Unaligned  # it carries into the next digit
            digits[index] = [low, here, elsewhere]
            size, elsewhere, index = size // here, elsewhere * here, index + 1
    return digits


def within(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """The parts of a copy that read elements [start, stop) of the source, as rectangles.

    Raises:
        `Unaligned`: when the source's loops are entangled, so that a range of it is not a few rectangles.
    """
    dims = sorted(copy.dims, key=lambda dim: dim.source, reverse=True)
    spans = [1]
    for dim in reversed(dims):
        if dim.source < spans[-1]:
            raise Unaligned
        spans.append(spans[-1] + (dim.size - 1) * dim.source)
    yield from _cut(copy, dims, spans[-2::-1], (start, stop))


def _cut(copy: Copy, dims: list[Dim], spans: list[int], only: tuple[int, int], at: int = 0) -> Iterator[Copy]:
    """`spans[k]`: how many elements of the source lie between the first and the last of the loops inside loop k."""
    start, stop = only
    if at == len(dims):
        if start <= copy.source < stop:
            yield replace(copy, dims=merged(copy.dims))
        return
    dim, span = dims[at], spans[at]
    first = max(0, -(-(start - copy.source) // dim.source))  # the first step that begins inside
    last = min(dim.size, (stop - copy.source - span) // dim.source + 1)  # the first one that does not end inside
    low = max(0, (start - copy.source - span) // dim.source + 1)
    high = min(dim.size, -(-(stop - copy.source) // dim.source))
    # The steps that are partly inside: before the first and after the last that are wholly so.
    cut: Iterable[int] = range(low, high)
    if first < last:
        part = narrowed(copy, dim, first, last)
        yield replace(part, dims=merged(part.dims))
        cut = (*range(low, first), *range(last, high))
    for step in cut:
        yield from _cut(narrowed(copy, dim, step, step + 1), dims, spans, only, at + 1)


def narrowed(copy: Copy, dim: Dim, first: int, last: int) -> Copy:
    """Returns the copy with steps [first, last) of one of its loops."""
    dims = tuple(replace(dim, size=last - first) if other is dim else other for other in copy.dims)
    return Copy(copy.name, copy.source + first * dim.source, copy.target + first * dim.target, dims)


def reversed_copy(copy: Copy, name: str) -> Copy:
    """The copy back, out of the tensor `name`."""
    return Copy(name, copy.target, copy.source, tuple(Dim(dim.size, dim.target, dim.source) for dim in copy.dims))
