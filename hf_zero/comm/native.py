"""The backend's own collectives, in place, for NCCL and others that implement them well.

Gathers and reductions have a process group each, so that neither waits behind the other; the backend runs them on its
own streams, ordered after the work that the current stream had when they were issued.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.base import DistributedComm, Pending


# torch 2.13 deprecates the `_tensor` names for these; 2.11 does not have the new ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeComm(DistributedComm):
    """Collectives through `torch.distributed` as they are.

    Args:
        group (`dist.ProcessGroup`): the data-parallel ranks.
        device (`torch.device`): where the tensors live.
        timeout_seconds (`float`): how long one exchange may take; the process group enforces it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float):
        super().__init__(group, device, timeout_seconds)
        ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=timeout_seconds)
        # local: the members of a part of the world make their groups without the others
        self._gather_group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        self._reduce_group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        work = _all_gather(full, shard, group=self._gather_group, async_op=True)
        self.counters.add("gather", shard.numel() * shard.element_size() * (self.num_ranks - 1))
        return Pending(work.wait)

    def reduce(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        summand = full if full.dtype == dtype else full.to(dtype)
        in_place = not accumulate and out.dtype == dtype
        average = out if in_place else torch.empty_like(out, dtype=dtype)
        work = _reduce_scatter(average, summand, op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)
        self.counters.add("reduce", average.numel() * average.element_size() * (self.num_ranks - 1))

        def finish():
            work.wait()
            average.div_(self.num_ranks)
            if accumulate:
                out.add_(average)
            elif not in_place:
                out.copy_(average)

        return Pending(finish)
