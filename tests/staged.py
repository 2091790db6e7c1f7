"""Ranks of gloo on an accelerator, for two ranks on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import world
from hf_zero.comm.base import DONE, Messages, Pending
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
    """Collectives for gloo on an accelerator's tensors. gloo sends CPU memory only, so values are copied there, and a
    collective is complete when it returns. It tries several ranks on one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, torch.device("cpu"), timeout_seconds, bucket_nbytes)
        self._host, self.device = self.device, device

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        copy = full.cpu()
        super().all_gather(copy, shard.cpu(), what=what).wait()
        full.copy_(copy)
        return DONE

    def reduce_scatter(self, full: Tensor, out: Tensor, **settings) -> Pending:
        average = out.cpu()
        super().reduce_scatter(full.cpu(), average, **settings).wait()
        out.copy_(average)
        return DONE

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        receiving = [(torch.empty_like(tensor, device=self._host), rank) for tensor, rank in receives]
        super().exchange([(tensor.cpu(), rank) for tensor, rank in sends], receiving, what=what, verb=verb).wait()
        for (tensor, _), (copy, _) in zip(receives, receiving):
            tensor.copy_(copy)
        return DONE

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return super().all_gather_rows(vector.to(self._host), what=what)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return self.all_gather_vector(vector, what=what).to(self.device)

    def broadcast_(self, tensor: Tensor) -> None:
        copy = tensor.to(self._host)
        super().broadcast_(copy)
        tensor.copy_(copy)
