"""A checksum of a flat buffer, which shows that values have changed."""

import torch
from torch import Tensor


# A buffer is read as rows of so many 8-byte words. Rows and columns are summed, each with a weight of its own.
_ROW = 16
# So many rows, 2 MiB, are summed at a time: they stay in a CPU's cache, and what the sum takes does not grow.
_NUM_ROWS = 2**14


def bits_of(values: Tensor) -> Tensor:
    """Sums up the bits of a flat buffer. The sum also depends on where they are: it changes when two words, rows or
    columns change places.

    Plain sums, since they go at the speed of the memory on every device.

    Args:
        values (`Tensor`): 1-D, a whole number of 8-byte words long.

    Returns:
        `Tensor`: 0-d int64, on the same device. Overflow wraps around.
    """
    words = values.detach().view(torch.int64)
    total = words.new_zeros(())
    most = max(_ROW, min(_NUM_ROWS, words.numel() // _ROW))
    weights = torch.arange(1, 2 * most, 2, device=words.device)
    starts = range(0, words.numel(), _ROW * _NUM_ROWS)
    if words.is_meta:  # one piece takes the memory of all, and what is behind it is read as often
        starts, others = starts[:1], words[_ROW * _NUM_ROWS :]
        total = total + others.sum() + others.sum()
    for start in starts:
        piece = words[start : start + _ROW * _NUM_ROWS]
        num_rows = piece.numel() // _ROW
        rows, rest = piece[: num_rows * _ROW].view(num_rows, _ROW), piece[num_rows * _ROW :]
        sums = (rows.sum(1) * weights[:num_rows]).sum(), (rows.sum(0) * weights[:_ROW]).sum()
        total = total * 31 + sums[0] + 7 * sums[1] + (rest * weights[: rest.numel()]).sum()
    return total
