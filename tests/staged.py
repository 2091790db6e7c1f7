"""Ranks of gloo on an accelerator, for two ranks on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import world
from hf_zero.comm.base import DONE, Bucket, Messages, Pending
from hf_zero.comm.blockwise import BLOCK_NUMEL
from hf_zero.comm.pairwise import PairwiseComm


@contextmanager
def gloo_on_devices() -> Iterator[None]:
    """Connects ranks of gloo whose tensors are on an accelerator, which are refused otherwise."""
    kind_of = world._gloo_kind_of

    def staged(group: dist.ProcessGroup, device: torch.device, shared_memory: bool):
        return kind_of(group, device, shared_memory) if device.type == "cpu" else (StagedComm, [])

    with mock.patch.object(world, "_gloo_kind_of", staged):
        yield


class StagedComm(PairwiseComm):
    """Collectives for gloo on an accelerator's tensors. gloo sends CPU memory only, so values are copied there in
    pieces, and each collective is complete when it returns.

    It tries several ranks on one device; ranks with a device each have a backend of the device's own.
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
        for start, stop in self._copies[0].pieces(out.numel(), self.num_ranks, widest, align_to=BLOCK_NUMEL):
            copies = self._copies[0].rows(self.num_ranks, stop - start, full.dtype).copy_(whole[:, start:stop])
            average = self._copies[1].rows(1, stop - start, out.dtype)[0].copy_(out[start:stop])
            super().reduce_scatter(copies.view(-1), average, dtype=dtype, accumulate=accumulate, what=what).wait()
            out[start:stop].copy_(average)
        return DONE

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        # [Note: no rank waits for one that waits] All ranks go from distance to distance and from piece to piece, and
        # wait for both neighbours at each: those that are furthest behind are always met by theirs.
        for distance in range(1, self.num_ranks):
            target, source = (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks
            going = [piece for tensor, rank in sends if rank == target for piece in self._cut(tensor)]
            coming = [piece for tensor, rank in receives if rank == source for piece in self._cut(tensor)]
            for there, here in zip_longest(going, coming):
                sending = [] if there is None else [(self._copy_of(there, 0).copy_(there), target)]
                receiving = [] if here is None else [(self._copy_of(here, 1), source)]
                super().exchange(sending, receiving, what=what, verb=verb).wait()
                if here is not None:
                    here.copy_(receiving[0][0])
        return DONE

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.view(-1)
        return [flat[start:stop] for start, stop in self._copies[0].pieces(flat.numel(), 1, flat.dtype)]

    def _copy_of(self, piece: Tensor, bucket: int) -> Tensor:
        return self._copies[bucket].rows(1, piece.numel(), piece.dtype)[0]

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return super().all_gather_rows(vector.to(self._host), what=what)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return self.all_gather_vector(vector, what=what).to(self.device)

    def broadcast_(self, tensor: Tensor) -> None:
        copy = tensor.to(self._host)
        super().broadcast_(copy)
        tensor.copy_(copy)
