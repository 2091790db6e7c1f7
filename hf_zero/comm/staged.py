"""gloo with tensors of an accelerator: its point-to-point messages know CPU memory alone, so values go through copies.

Meant for trying several ranks on one device; ranks with a device each have a backend of the device's own.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.base import Pending
from hf_zero.comm.pairwise import PairwiseComm


class StagedComm(PairwiseComm):
    """The pairwise exchange between copies in CPU memory.

    Args:
        group, device, timeout_seconds, bucket_nbytes: as for `PairwiseComm`; the tensors live on `device`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, torch.device("cpu"), timeout_seconds, bucket_nbytes)
        self._host, self.device = self.device, device

    def gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        copy = torch.empty(full.shape, dtype=full.dtype, device=self._host)
        pending = super().gather(copy, shard.to(self._host), what=what)
        return _then(pending, lambda: full.copy_(copy))

    def reduce(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        average = out.to(self._host, copy=True)
        pending = super().reduce(full.to(self._host), average, dtype=dtype, accumulate=accumulate, what=what)
        return _then(pending, lambda: out.copy_(average))

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], *, what: str) -> Pending:
        copies = [
            (torch.empty(tensor.shape, dtype=tensor.dtype, device=self._host), rank) for tensor, rank in receives
        ]
        pending = super().exchange([(tensor.to(self._host), rank) for tensor, rank in sends], copies, what=what)
        return _then(pending, lambda: [t.copy_(copy) for (t, _), (copy, _) in zip(receives, copies)])

    def all_gather_vector(self, vector: Tensor) -> Tensor:
        return super().all_gather_vector(vector.to(self._host))


def _then(pending: Pending, copy) -> Pending:
    def finish():
        pending.wait()
        copy()

    return Pending(finish)
