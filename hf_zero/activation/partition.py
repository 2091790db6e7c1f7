"""Partitioning of replicated activations over the tensor-parallel ranks."""

import torch
from torch import Tensor

from hf_zero.comm import Comm, Counters
from hf_zero.errors import UnsupportedError
from hf_zero.sharding.layout import Sample


class Division:
    """Partitions tensors over the tensor-parallel ranks, which all hold the same values, and gathers them again
    (ZeRO-R P_a, arXiv 1910.02054, section 6.1).

    Args:
        comm (`Comm`): The tensor-parallel ranks.
        counters (`Counters`): Counts the bytes sent, as "activation".
    """

    def __init__(self, comm: Comm, counters: Counters):
        self._comm = comm
        self._counters = counters
        self._checked: set[int] = set()  # calls of blocks whose tensors were compared

    def part_numel(self, numel: int) -> int:
        """Returns the number of elements of a part. The last part may be padded."""
        return -(-numel // self._comm.num_ranks)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a 1-D tensor, a view unless it has to be padded."""
        numel = self.part_numel(whole.numel())
        part = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def whole_of(self, part: Tensor, numel: int) -> Tensor:
        """Gathers a tensor of `numel` elements from the parts of all ranks, which must call it in the same order."""
        whole = part.new_empty(part.numel() * self._comm.num_ranks)
        own = whole[self._comm.rank * part.numel() : (self._comm.rank + 1) * part.numel()].copy_(part)
        self._comm.all_gather(whole, own, what="checkpointed input").wait()
        sent = part.numel() * part.element_size() * (self._comm.num_ranks - 1)
        self._counters.add("activation", sent)
        return whole[:numel]

    def check(self, whole: Tensor, place: int) -> None:
        """Checks that all ranks have the same bits, in the first call for a place. Raises [`UnsupportedError`] on all
        ranks otherwise."""
        if place in self._checked:
            return
        bits = Sample([(0, whole.numel())], whole.device).sum_of(whole)
        own = torch.stack([torch.full_like(bits, whole.numel()), bits])
        if len(self._comm.all_gather_vector(own).unique(dim=0)) > 1:
            raise UnsupportedError(
                "partition_activations: the inputs of a checkpointed block differ between tensor-parallel ranks "
                "(different batches or sequence parallelism), expected equal inputs; give the ranks of a "
                "tensor-parallel group the same batch, or use offload_activations"
            )
        self._checked.add(place)
