"""A sum over the bits of a flat buffer, by which it shows that values have changed."""

import torch
from torch import Tensor


# A stretch of so many 8-byte words has one weight: short, so that rows which change places are noticed.
_STRETCH = 64
# So many stretches are summed at a time: what the sum takes does not grow with the buffer.
_NUM_STRETCHES = 2**16


def bits_of(values: Tensor) -> Tensor:
    """A sum over the bits of a flat buffer, in which each stretch of 512 bytes has a weight of its own.

    Args:
        values (`Tensor`): 1-D, a whole number of 8-byte words long.

    Returns:
        `Tensor`: 0-d int64, on the same device. Overflow wraps around.
    """
    words = values.detach().view(torch.int64)
    most = min(_NUM_STRETCHES, max(1, words.numel() // _STRETCH))
    weights = torch.arange(1, 2 * most, 2, device=words.device)
    total = words.new_zeros(())
    for start in range(0, words.numel(), _STRETCH * _NUM_STRETCHES):
        piece = words[start : start + _STRETCH * _NUM_STRETCHES]
        whole = piece.numel() // _STRETCH * _STRETCH
        sums = piece[:whole].view(-1, _STRETCH).sum(1)
        total = total * 31 + (sums * weights[: sums.numel()]).sum() + piece[whole:].sum()
    return total
