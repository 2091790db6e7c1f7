"""Activations that are equal on tensor-parallel ranks, divided over these ranks (ZeRO-R P_a, arXiv 1910.02054, section
6.1)."""

import torch
from torch import Tensor, nn

from hf_zero.activation.checkpointing import FLAG
from hf_zero.comm import Comm, Counters
from hf_zero.errors import UnsupportedError
from hf_zero.sharding.layout import Sample


def refuse_without_switch(model: nn.Module) -> None:
    """Refuses a model whose blocks transformers cannot checkpoint."""
    if not any(hasattr(module, FLAG) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__}: no module has a {FLAG!r} switch, so inputs of checkpointed blocks cannot be "
            "told from other activations; leave partition_activations out"
        )


class Division:
    """Divides tensors that are equal on tensor-parallel ranks over these ranks, and makes them whole again.

    Args:
        counters (`Counters`): where the bytes sent are added, as "activation".
    """

    def __init__(self, comm: Comm, counters: Counters):
        self._comm = comm
        self._counters = counters
        self._is_checked = False

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a 1-D tensor, padded if it is the last, in memory of its own."""
        self._check(whole)
        numel = -(-whole.numel() // self._comm.num_ranks)
        part = whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        return part.clone() if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def whole_of(self, part: Tensor, numel: int) -> Tensor:
        """Returns a whole tensor of `numel` elements from the parts of all ranks, which call it in the same order."""
        self._is_checked = True
        whole = part.new_empty(part.numel() * self._comm.num_ranks)
        own = whole[self._comm.rank * part.numel() : (self._comm.rank + 1) * part.numel()].copy_(part)
        self._comm.all_gather(whole, own, what="checkpointed input").wait()
        self._counters.add("activation", part.nbytes * (self._comm.num_ranks - 1))
        return whole[:numel]

    def _check(self, whole: Tensor) -> None:
        """Checks that all ranks have the same bits, up to the first backward. Raises [`UnsupportedError`] if they have
        not, on all ranks."""
        if self._is_checked:
            return
        bits = Sample([(0, whole.numel())], whole.device).sum_of(whole)
        own = torch.stack([torch.full_like(bits, whole.numel()), bits])
        if len(self._comm.all_gather_vector(own).unique(dim=0)) > 1:
            raise UnsupportedError(
                "partition_activations: the inputs of a checkpointed block differ between tensor-parallel ranks, "
                "which were expected to have the same (other batches, or sequence parallelism); give the ranks of a "
                "tensor-parallel group the same batch, or use offload_activations"
            )
