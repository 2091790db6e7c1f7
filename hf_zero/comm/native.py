"""The backend's own collectives, in place, for NCCL and other backends that implement them well.

The backend runs them on its own streams, ordered after the work that the current stream had when they were issued.

[Note: one communicator] All models over one set of ranks share one communicator. Kernels of two may run at the same
time, and each holds a part of the device while it waits for its peers: where one rank starts them in another order
than another rank does, both wait for ever. So a second one, for reductions alone, is an option, and then NCCL has to
start kernels in the order in which the host launches them, which is the same on all ranks:
`NCCL_LAUNCH_ORDER_IMPLICIT=1`, from 2.26 on.
"""

import os
from collections import deque
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Bucket, Pending
from hf_zero.comm.blockwise import PackedReduction, least_nbytes
from hf_zero.comm.distributed import DistributedComm, bytes_of
from hf_zero.errors import ConfigError


# torch 2.13 deprecates the `_tensor` name; 2.11 does not have the new one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
LAUNCH_ORDER_VERSION = (2, 26)

# Of each process group: communicators by purpose and time limit.
_COMMUNICATORS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup]] = WeakKeyDictionary()


def refuse_unordered(setting: str, version: tuple[int, ...]) -> None:
    """Refuses a second communicator where NCCL would launch its kernels and those of the first in no common order.

    Args:
        setting (`str`): what asks for it, for the message.
        version (`tuple[int, ...]`): of NCCL.

    Raises:
        `ConfigError`: saying what to set.
    """
    if version < LAUNCH_ORDER_VERSION or os.environ.get(LAUNCH_ORDER) != "1":
        raise ConfigError(
            f"{setting}: with NCCL {'.'.join(map(str, version))} and {LAUNCH_ORDER}="
            f"{os.environ.get(LAUNCH_ORDER, '(not set)')} two communicators may wait for each other for ever; set "
            f"{LAUNCH_ORDER}=1 for all ranks before they start, with NCCL 2.26 or newer, or leave the setting out"
        )


def communicator(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, purpose: str
) -> dist.ProcessGroup:
    """Returns a process group of the same ranks, whose kernels go before those that compute where the backend knows
    priorities. Who asks for the same purpose again gets the same one. The first call is collective.

    Args:
        group (`dist.ProcessGroup`): the ranks.
        device (`torch.device`): where the tensors live.
        timeout (`timedelta`): how long one exchange may take.
        purpose (`str`): what goes through it.
    """
    known = _COMMUNICATORS.setdefault(group, {})
    if (purpose, timeout) not in known:
        options = None
        if device.type == "cuda" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout
        members, backend = dist.get_process_group_ranks(group), dist.get_backend_config(group)
        made = ranks.make_group(members, timeout=timeout, backend=backend, pg_options=options)
        ranks.same_ranks(made, group)
        known[purpose, timeout] = made
    return known[purpose, timeout]


class NativeComm(DistributedComm):
    """Collectives that call those of `torch.distributed` directly.

    [Note: what a reduction needs] Summands in the dtype of the sum are reduced where they lie. Others are cast on
    their way into one of two buckets, piece by piece: the same elements of every rank's range, which is what a
    reduce-scatter of them takes. One bucket is filled while the other travels. All of it is queued at once, on a
    stream of its own, so that neither the host nor what computes meanwhile waits for it.

    Args:
        group (`dist.ProcessGroup`): the data-parallel ranks.
        device (`torch.device`): where the tensors live.
        timeout_seconds (`float`): how long one exchange may take; the process group enforces it.
        bucket_nbytes (`int`): size of each bucket.
        separate_reductions (`bool`): gives reductions a communicator of their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        bucket_nbytes: int,
        separate_reductions: bool = False,
    ):
        super().__init__(group, device, timeout_seconds)
        purposes = ("collectives", "reductions" if separate_reductions else "collectives")
        with self._reaching("connecting the ranks"):
            # objects, rows and messages go through the first one too
            self.group, self._reduce_group = (
                communicator(group, device, self._timeout, purpose) for purpose in purposes
            )
        self._backend = torch.get_device_module(device)
        self._stream = self._backend.Stream()
        self._buckets = [Bucket(bucket_nbytes, device) for _ in range(2)]

    @property
    def buckets(self) -> list[Bucket]:
        return self._buckets

    @property
    def sum_buckets(self) -> list[Bucket]:
        return []  # they are summed where they lie

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return super().all_gather_rows(vector.to(self.device), what=what)  # what rests on the host is counted there

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        under_way = f"gather of unit {what!r}"
        with self._reaching(under_way):
            work = self._collect(full, shard)
        self.counters.add("gather", shard.numel() * shard.element_size() * (self.num_ranks - 1), what)
        return Pending(partial(self._finish, work, under_way))

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, bits: int | None = None
    ) -> Pending:
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream), self._reaching(f"reduce of unit {what!r}"):
            if bits is not None:
                self._reduce_packed(full, out, bits, accumulate, what)
            elif full.dtype is dtype:
                self._reduce_in_place(full, out, accumulate)
            else:
                self._reduce_in_pieces(full.view(self.num_ranks, -1), out, dtype, accumulate)
            done = self._backend.Event()
            done.record(self._stream)
        if bits is None:  # else the exchange has counted
            self.counters.add("reduce", out.numel() * dtype.itemsize * (self.num_ranks - 1), what)
        return Pending(done.wait)

    def _group_of(self, verb: str) -> dist.ProcessGroup:
        return self._reduce_group if verb == "reduce" else self.group

    def _reduce_packed(self, full: Tensor, out: Tensor, bits: int, accumulate: bool, what: str) -> None:
        least = least_nbytes(self.num_ranks, bits)
        PackedReduction(
            full,
            out,
            bits=bits,
            rank=self.rank,
            members=range(self.num_ranks),
            count=self.num_ranks,
            accumulate=accumulate,
            exchange=partial(self.exchange, what=what, verb="reduce"),
            memory=[bucket.rows(1, max(bucket.nbytes, least), torch.uint8)[0] for bucket in self._buckets],
        ).finish()

    def _reduce_in_place(self, full: Tensor, out: Tensor, accumulate: bool) -> None:
        goes_there = not accumulate and out.dtype is full.dtype
        total = out if goes_there else full.view(self.num_ranks, -1)[self.rank]
        self._sum(full, total).wait()
        total.div_(self.num_ranks)
        if not goes_there:
            _put(out, total, accumulate)

    def _reduce_in_pieces(self, ranges: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
        """Reduces summands of shape `(num_ranks, out.numel())` in pieces, where they are not in the dtype of their
        sum."""
        under_way: deque = deque()

        def finish_one():
            work, total, target = under_way.popleft()
            work.wait()
            _put(target, total.div_(self.num_ranks), accumulate)

        pieces = self._buckets[0].pieces(out.numel(), self.num_ranks, dtype)
        for index, (start, stop) in enumerate(pieces):
            if len(under_way) == len(self._buckets):
                finish_one()
            bucket = self._buckets[index % len(self._buckets)].rows(self.num_ranks, stop - start, dtype)
            bucket.copy_(ranges[:, start:stop])
            total = bucket[self.rank]
            under_way.append((self._sum(bucket.view(-1), total), total, out[start:stop]))
        while under_way:
            finish_one()

    def _finish(self, work: dist.Work, what: str) -> None:
        with self._reaching(what):
            work.wait()

    def _collect(self, full: Tensor, shard: Tensor):
        return ranks.gather_single(bytes_of(full), bytes_of(shard), group=self.group, async_op=True)

    def _sum(self, full: Tensor, out: Tensor):
        return _reduce_scatter(out, full, op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)


def _put(target: Tensor, average: Tensor, accumulate: bool) -> None:
    if accumulate:
        target.add_(average)
    else:
        target.copy_(average)
