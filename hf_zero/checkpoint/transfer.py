"""Rectangular copies carried out between a rank's runs of parameters and files, in pieces of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from hf_zero.checkpoint.strided import Copy, narrowed, within


# A piece that has to be reordered or converted is copied: this is how much at a time.
PIECE_NUMEL = 2**20
# Rows of a file that begin closer to one another than this are read in one go with what lies between them.
GAP_NUMEL = 4 * 2**10


def outgoing(copy: Copy, start: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields what a range of the source contributes to the target, as ranges of the target.

    Args:
        copy (`Copy`): from a parameter to a tensor of a file.
        start (`int`): first element of the run in the flattened parameter.
        flat (`Tensor`): the run, 1-D.

    Yields:
        first element in the target, and 1-D values.
    """
    for part in within(copy, start, start + flat.numel()):
        for block in _blocks(part, PIECE_NUMEL):
            values, firsts = _view(block, start, flat), _rows(block)
            yield from zip(firsts, values.reshape(len(firsts), -1))


def incoming(
    copies: Iterable[Copy],
    start: int,
    out: Tensor,
    read: Callable[[str, int, Tensor], None],
    *,
    through: torch.dtype | None = None,
) -> None:
    """Fills a run of a parameter from the tensors that it is made of.

    Args:
        copies (`Iterable[Copy]`): from the parameter to those tensors, whose names they bear: a load goes backwards.
        start (`int`): first element of the run in the flattened parameter.
        out (`Tensor`): the run, 1-D.
        read (`Callable`): (tensor, first element, 1-D out) fills `out`, in its dtype.
        through (`torch.dtype`, *optional*): rounds the values to this dtype on the way.
    """
    dtype = through or out.dtype
    for copy in copies:
        for part in within(copy, start, start + out.numel()):
            if _is_run(part) and dtype is out.dtype:
                first = part.source - start
                read(copy.name, part.target, out[first : first + part.numel])
                continue
            for block in _blocks(part, PIECE_NUMEL, 8 * PIECE_NUMEL):
                _view(block, start, out).copy_(_gathered(block, dtype, read))


def _gathered(block: Copy, dtype: torch.dtype, read) -> Tensor:
    """The values of a block in the order of the target's loops: rows that lie close together are read at once."""
    firsts, sizes = _rows(block), [dim.size for dim in block.dims]
    if _lies_close(block, len(firsts)):
        whole = torch.empty(_span(block), dtype=dtype)
        read(block.name, block.target, whole)
        return whole.as_strided(sizes, [dim.target for dim in block.dims])
    values = torch.empty(len(firsts), block.numel // len(firsts), dtype=dtype)
    for first, row in zip(firsts, values):
        read(block.name, first, row)
    return values.view(sizes)


def _blocks(part: Copy, limit: int, span_limit: int | None = None) -> Iterator[Copy]:
    """Cuts a copy into ones of at most `limit` elements, unless it is one run on both sides, which costs no memory.

    Those that are to be read at once are cut until what is read is at most `span_limit` elements.
    """
    is_long = span_limit is not None and _span(part) > span_limit and _lies_close(part, len(_rows(part)))
    if (part.numel <= limit and not is_long) or _is_run(part):
        yield part
        return
    outer = next(dim for dim in part.dims if dim.size > 1)
    step = max(1, min(limit // (part.numel // outer.size), outer.size // 2))
    for first in range(0, outer.size, step):
        yield from _blocks(narrowed(part, outer, first, min(first + step, outer.size)), limit, span_limit)


def _span(block: Copy) -> int:
    """Elements of the target from the first to the last of a block."""
    return 1 + sum((dim.size - 1) * dim.target for dim in block.dims)


def _lies_close(block: Copy, num_rows: int) -> bool:
    return _span(block) <= max(block.numel, num_rows * GAP_NUMEL)


def _is_run(part: Copy) -> bool:
    """Whether it is one run of elements, in the same order on both sides."""
    return len(part.dims) <= 1 and all(dim.source == dim.target == 1 for dim in part.dims)


def _rows(block: Copy) -> list[int]:
    """Returns where the ranges of the target begin that a block consists of, its largest steps first."""
    run, outer = 1, list(block.dims)
    while outer and outer[-1].target == run:
        run *= outer.pop().size
    steps = product(*(range(0, dim.size * dim.target, dim.target) for dim in outer))
    return [block.target + sum(step) for step in steps]


def _view(block: Copy, start: int, flat: Tensor) -> Tensor:
    """The block's elements of a run, in the order of the target's loops."""
    sizes, strides = [dim.size for dim in block.dims], [dim.source for dim in block.dims]
    return flat.as_strided(sizes, strides, flat.storage_offset() + block.source - start)
