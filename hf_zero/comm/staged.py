"""gloo with tensors of an accelerator: its point-to-point messages know CPU memory alone, so values go through copies.

Meant for trying several ranks on one device; ranks with a device each have a backend of the device's own.
"""

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.base import DONE, Pending
from hf_zero.comm.bucket import Bucket
from hf_zero.comm.pairwise import PairwiseComm


class StagedComm(PairwiseComm):
    """The pairwise exchange between copies in CPU memory, piece by piece. Each collective is done when it returns: the
    copies of the next one go through the same memory.

    Args:
        group, device, timeout_seconds, bucket_nbytes: as for `PairwiseComm`; the tensors live on `device`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, torch.device("cpu"), timeout_seconds, bucket_nbytes)
        self._host, self.device = self.device, device
        self._copies = [Bucket(bucket_nbytes, self._host) for _ in range(2)]

    @property
    def buckets(self) -> list[Bucket]:
        return [*super().buckets, *self._copies]

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        whole = full.view(self.num_ranks, -1)
        for start, stop in self._copies[0].pieces(shard.numel(), self.num_ranks, full.dtype):
            copies = self._copies[0].rows(self.num_ranks, stop - start, full.dtype)
            own = copies[self.rank].copy_(shard[start:stop])
            super().all_gather(copies.view(-1), own, what=what).wait()
            whole[:, start:stop].copy_(copies)
        return DONE

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        whole = full.view(self.num_ranks, -1)
        widest = max(full.dtype, out.dtype, key=lambda dtype: dtype.itemsize)
        for start, stop in self._copies[0].pieces(out.numel(), self.num_ranks, widest):
            copies = self._copies[0].rows(self.num_ranks, stop - start, full.dtype).copy_(whole[:, start:stop])
            average = self._copies[1].rows(1, stop - start, out.dtype)[0].copy_(out[start:stop])
            super().reduce_scatter(copies.view(-1), average, dtype=dtype, accumulate=accumulate, what=what).wait()
            out[start:stop].copy_(average)
        return DONE

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], *, what: str) -> Pending:
        # [Note: no rank waits for one that waits] All ranks go from distance to distance and from piece to piece, and
        # wait for both neighbours at each: those that are furthest behind are always met by theirs.
        for distance in range(1, self.num_ranks):
            target, source = (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks
            going = [piece for tensor, rank in sends if rank == target for piece in self._cut(tensor)]
            coming = [piece for tensor, rank in receives if rank == source for piece in self._cut(tensor)]
            for there, here in zip_longest(going, coming):
                leaving = [] if there is None else [(self._copy_of(there, 0).copy_(there), target)]
                arriving = [] if here is None else [(self._copy_of(here, 1), source)]
                super().exchange(leaving, arriving, what=what).wait()
                if here is not None:
                    here.copy_(arriving[0][0])
        return DONE

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.view(-1)
        return [flat[start:stop] for start, stop in self._copies[0].pieces(flat.numel(), 1, flat.dtype)]

    def _copy_of(self, piece: Tensor, bucket: int) -> Tensor:
        return self._copies[bucket].rows(1, piece.numel(), piece.dtype)[0]

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return super().all_gather_vector(vector.to(self._host), what=what)
