"""Buckets: memory of a constant size through which larger tensors go in pieces (ZeRO-R C_B, arXiv
1910.02054 section 6.2)."""

import torch
from torch import Tensor


# Of a bucket whose size nobody has chosen. A piece costs a latency whatever its size, and what is staged takes memory.
MESSAGES_NBYTES = 4 * 2**20
ONE_HOST_NBYTES, SEVERAL_HOSTS_NBYTES = 32 * 2**20, 64 * 2**20  # the backend's own collectives
# Where ranks read one another's memory nothing is staged, but for tensors that a caller made elsewhere.
SHARED_NBYTES = 8 * 2**20

MAX_ITEMSIZE = 8
# Pieces begin at multiples of so many elements, as shards do, see `hf_zero.sharding.layout`.
ALIGN_NUMEL = 16


class Bucket:
    """One buffer, made when it is first used and kept from then on.

    Args:
        nbytes (`int`): its size.
        device (`torch.device`): where it lies.
    """

    memory: Tensor | None = None  # None until the first use

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self._device = device

    def pieces(self, numel: int, num_rows: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Cuts `num_rows` equal ranges of `numel` elements into the pieces (start, stop) that fit together."""
        step = self.nbytes // dtype.itemsize // num_rows
        step = step // ALIGN_NUMEL * ALIGN_NUMEL or max(1, step)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def rows(self, num_rows: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The first bytes of the buffer as a contiguous matrix, `(num_rows, numel)`."""
        if self.memory is None:
            # one element of each row must fit, be the ranks ever so many
            nbytes = max(self.nbytes, num_rows * MAX_ITEMSIZE)
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self.memory[: num_rows * numel * dtype.itemsize].view(dtype).view(num_rows, numel)
