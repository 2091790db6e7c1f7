"""Divides what is equal on tensor-parallel ranks among them."""

import torch
from torch import Tensor

from hf_zero.comm import Comm, Counters
from hf_zero.errors import UnsupportedError


# Bytes that are added up before they are weighed by their place.
ROW_NBYTES = 1024


class Division:
    """Cuts a tensor that every tensor-parallel rank has into parts, one for each rank, and puts it together again
    (ZeRO-R P_a, arXiv 1910.02054, section 6.1).

    Args:
        comm (`Comm`): the tensor-parallel ranks.
        counters (`Counters`): where the bytes sent are added, as "activation".
    """

    def __init__(self, comm: Comm, counters: Counters):
        self._comm = comm
        self._counters = counters
        self._checked: set[int] = set()  # places whose tensors were found equal

    def part_numel(self, numel: int) -> int:
        """Elements of a part; the last one may be padded."""
        return -(-numel // self._comm.num_ranks)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a 1-D tensor; of its memory, unless it has to be padded."""
        numel = self.part_numel(whole.numel())
        part = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def whole_of(self, part: Tensor, numel: int) -> Tensor:
        """Returns the whole of so many elements, from the parts of all ranks, which call it in the same order."""
        whole = part.new_empty(part.numel() * self._comm.num_ranks)
        own = whole[self._comm.rank * part.numel() : (self._comm.rank + 1) * part.numel()].copy_(part)
        self._comm.all_gather(whole, own, what="checkpointed input").wait()
        sent = part.numel() * part.element_size() * (self._comm.num_ranks - 1)
        self._counters.add("activation", sent)
        return whole[:numel]

    def check(self, whole: Tensor, place: int) -> None:
        """Makes sure, when it is called for a place for the first time, that all ranks have the same bits.

        Raises:
            `UnsupportedError`: when they have not, on all ranks.
        """
        if place in self._checked:
            return
        own = torch.tensor([whole.numel(), *_digest(whole.view(torch.uint8))], device=whole.device)
        if len(self._comm.all_gather_vector(own).unique(dim=0)) > 1:
            raise UnsupportedError(
                "partition_activations: the inputs of a checkpointed block differ between tensor-parallel ranks, "
                "which were expected to have the same (other batches, or sequence parallelism); give the ranks of a "
                "tensor-parallel group the same batch, or use offload_activations"
            )
        self._checked.add(place)


def _digest(data: Tensor) -> list[int]:
    """Two numbers that change with any byte of a 1-D tensor, and with their order."""
    whole = data.numel() // ROW_NBYTES * ROW_NBYTES
    rows = torch.cat([data[:whole].view(-1, ROW_NBYTES).sum(1, dtype=torch.int64), data[whole:].to(torch.int64)])
    weights = torch.arange(1, rows.numel() + 1, device=rows.device)
    return [int(rows.sum()), int((rows * weights).sum())]
