"""Collectives of `torch.distributed`: small, rare ones with a common implementation for all backends, including error
handling; and the backend's own, in place, for NCCL and similar backends.

Backends run collectives on their own streams, ordered after the work that the current stream had at the call.

[Note: one communicator] All models over the same ranks share one communicator. Kernels of two communicators may run at
the same time, and each occupies part of the device while it waits for its peers. If two ranks start them in different
orders, both wait forever. Shard groups need a second communicator; NCCL must then start kernels in the order in which
the host launches them, which is the same on all ranks: `NCCL_LAUNCH_ORDER_IMPLICIT=1`, available from NCCL 2.26.
`import hf_zero` sets it, unless the user has set it or the process group already exists: NCCL may have read it then.
"""

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Bucket, Comm, Messages, Pending
from hf_zero.comm.streams import Streams
from hf_zero.errors import CommError, ConfigError, HfZeroError


# Time limit for the connections between hosts, which all ranks open at the same time.
CONNECTING_SECONDS = 60.0
# Up to this many ranks exchange small values in pairs, so that errors name the missing rank.
MAX_PAIRED_RANKS = 32
# Small collectives, which all ranks call in the same order, use this tag minus the size of their messages.
SMALL_TAG = 0x3FFFFFFE
# torch 2.13 deprecates the `_tensor` name; 2.11 does not have the new one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
LAUNCH_ORDER_VERSION = (2, 26)


class DistributedComm(Comm):
    """Small, rare collectives with the same implementation for all `torch.distributed` backends.

    [Note: naming the missing rank] If a collective fails, backends do not report which rank is missing. With gloo and
    at most `MAX_PAIRED_RANKS` ranks, small values are therefore exchanged by point-to-point messages, so that each
    wait has a known peer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float):
        super().__init__(device, timeout_seconds)
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._has_gloo = ranks.is_gloo(group)
        self._is_gloo = ranks.is_gloo(group, device)
        self._peers = dist.get_process_group_ranks(group)
        self._side_groups: dict[str, DistributedComm] = {}  # by purpose, created on demand

    def exchange(self, sends: Messages, receives: Messages, *, what: str, verb: str = "exchange") -> Pending:
        ops = [dist.P2POp(dist.irecv, bytes_of(tensor), self._peers[rank], self.group) for tensor, rank in receives]
        ops += [dist.P2POp(dist.isend, bytes_of(tensor), self._peers[rank], self.group) for tensor, rank in sends]
        self.counters.add(verb, sum(tensor.nbytes for tensor, _ in sends), what)
        with self._reaching(f"{verb} of unit {what!r}"):
            works = dist.batch_isend_irecv(ops) if ops else []

        def finish():
            with self._reaching(f"{verb} of unit {what!r}"):
                for work in works:
                    work.wait()

        return Pending(finish)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        rows = self._gather_small(vector.detach().contiguous().view(-1), what)
        self.counters.add("scalar", vector.nbytes * (self.num_ranks - 1))
        return rows

    def broadcast_(self, tensor: Tensor) -> None:
        with self._reaching("a broadcast", 0 if self.rank else None):
            dist.broadcast(bytes_of(tensor), self._peers[0], group=self.group)
        self.counters.add("broadcast", tensor.nbytes if self.rank == 0 else 0)

    def barrier(self) -> None:
        if self._has_gloo:
            self._gather_small(torch.zeros(1, dtype=torch.uint8), "a barrier")
        else:
            with self._reaching("a barrier"):  # without `device_ids`, torch uses the current device and warns
                dist.barrier(self.group, device_ids=None if self.device.index is None else [self.device.index])

    def side_group(self, purpose: str) -> Comm:
        if purpose not in self._side_groups:
            members, limit = dist.get_process_group_ranks(self.group), timedelta(seconds=CONNECTING_SECONDS)
            try:
                group = ranks.make_group(members, timeout=min(limit, self._timeout), backend="gloo")
            except RuntimeError as error:
                if ranks.closed_ranks_soon(self.group, error):
                    raise ranks.failure("connecting the ranks", self.group, error) from error
                interface = os.environ.get("GLOO_SOCKET_IFNAME", "(not set)")
                raise CommError(
                    f"connecting the hosts of the ranks by gloo: {str(error).partition(chr(10))[0]}; "
                    f"{ranks.route_to_master()}; GLOO_SOCKET_IFNAME={interface}: on every host, set it to the "
                    "interface that reaches the other hosts"
                ) from error
            group._get_backend(ranks.CPU)._set_default_timeout(self._timeout)
            ranks.same_ranks(group, self.group)
            self._side_groups[purpose] = DistributedComm(group, torch.device("cpu"), self.timeout_seconds)
        return self._side_groups[purpose]

    def send(self, tensor: Tensor, rank: int) -> None:
        with self._reaching("sending", rank):
            dist.send(bytes_of(tensor), self._peers[rank], group=self.group)
        self.counters.add("send", tensor.nbytes)

    def receive(self, tensor: Tensor, rank: int) -> None:
        with self._reaching("receiving", rank):
            dist.recv(bytes_of(tensor), self._peers[rank], group=self.group)

    def broadcast_object(self, obj):
        box = [obj]
        with self._reaching("a broadcast", 0 if self.rank else None):
            dist.broadcast_object_list(box, src=self._peers[0], group=self.group, device=self._small_device)
        return box[0]

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        # identical pickles are loaded once: ranks that send the same share the object, which is never modified
        device, read = self._small_device, cache(pickle.loads)
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = self._gather_small(torch.tensor([own.numel()], device=device), what).view(-1).tolist()
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: own.numel()] = own
        texts = self._gather_small(padded, what).cpu().numpy().tobytes()
        return [read(texts[start : start + size]) for start, size in zip(range(0, len(texts), longest), sizes)]

    @property
    def _small_device(self) -> torch.device:
        """The device from which pickled objects are sent."""
        return ranks.CPU if self._has_gloo else self.device

    def _gather_small(self, own: Tensor, what: str) -> Tensor:
        """Returns the 1-D tensors of all ranks in rank order, as rows of one tensor."""
        rows = own.new_empty(self.num_ranks, own.numel())
        is_on_gloo = self._has_gloo and own.is_cpu
        if is_on_gloo and self.num_ranks <= MAX_PAIRED_RANKS:
            receives = [(rows[rank], rank) for rank in reversed(self._others)]
            # values of other sizes are of another collective: gloo would abort, or leave a part of them unwritten
            tag = SMALL_TAG - own.nbytes % SMALL_TAG
            works = self._post(receives, [(own, rank) for rank in self._others], tag, what)
            rows[self.rank].copy_(own)
            self._wait(works, what)
            return rows
        with self._reaching(what):
            if is_on_gloo or self._is_gloo:
                dist.all_gather(list(rows), own, group=self.group)
            else:
                ranks.gather_single(bytes_of(rows), bytes_of(own), group=self.group)
        return rows

    @cached_property
    def _others(self) -> list[int]:
        """All other ranks, starting with the one after this rank."""
        return [(self.rank + distance) % self.num_ranks for distance in range(1, self.num_ranks)]

    def _post(self, receives: Messages, sends: Messages, tag: int, what: str) -> list[tuple[int, dist.Work]]:
        """Starts messages from and to other ranks. `_wait` waits for the result."""
        works: list[tuple[int, dist.Work]] = []
        for begin, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in messages:
                try:
                    works.append((peer, begin(tensor, self._peers[peer], group=self.group, tag=tag)))
                except (RuntimeError, OSError) as error:
                    self._raise(error, what, peer)
        return works

    def _wait(self, works: list[tuple[int, dist.Work]], what: str) -> None:
        for peer, work in works:
            try:
                work.wait(self._timeout)
            except (RuntimeError, OSError) as error:
                self._raise(error, what, peer)

    @contextmanager
    def _reaching(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Converts an error of the backend to a `CommError`, see `_raise`."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._raise(error, what, peer)

    def _raise(self, error: Exception, what: str, peer: int | None) -> NoReturn:
        """Raises a `CommError` that names the rank for an error of the backend. Errors of this rank's own device are
        raised unchanged."""
        is_known = isinstance(error, (HfZeroError, torch.OutOfMemoryError, torch.AcceleratorError))
        # unlike those of other backends, gloo's errors cannot always be recognized
        if is_known or not (self._is_gloo or ranks.is_of_transport(error)):
            raise error
        raise self._failed(what, peer, error) from error

    def _failed(self, what: str, peer: int | None, error: BaseException | str) -> CommError:
        gone = set().union(*(ranks.closed_ranks(side_group.group) for side_group in self._side_groups.values()))
        return ranks.failure(what, self.group, error, peer=peer, gone=gone, seconds=self.timeout_seconds)


def bytes_of(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as bytes. Values that are moved but not summed are sent as bytes, because gloo and
    NCCL support only some dtypes."""
    return tensor.view(-1).view(torch.uint8)


def refuse_unordered(setting: str, version: tuple[int, ...]) -> None:
    """Raises [`ConfigError`] for a setting that needs a second communicator if this version or configuration of NCCL
    does not launch the kernels of both in the same order on all ranks."""
    if version < LAUNCH_ORDER_VERSION or os.environ.get(LAUNCH_ORDER) != "1":
        raise ConfigError(
            f"{setting}: with NCCL {'.'.join(map(str, version))} and {LAUNCH_ORDER}="
            f"{os.environ.get(LAUNCH_ORDER, '(not set)')} two communicators may wait for each other forever; set "
            f"{LAUNCH_ORDER}=1 for all ranks before they start, with NCCL 2.26 or newer, or omit the setting"
        )


class NativeComm(DistributedComm):
    """The collectives of the `torch.distributed` backend.

    [Note: reductions] Summands in the dtype of the sum are reduced in place. Others are cast piece by piece into two
    buckets, each piece holding the same elements of every rank's range, as a reduce-scatter requires. One bucket is
    filled while the other is on the wire. Everything is queued at once on a separate stream, so neither the host nor
    the computation waits.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, device, timeout_seconds)
        self._streams = Streams(device)
        self._stream = self._streams.new()
        self._buckets = [Bucket(bucket_nbytes, device) for _ in range(2)]

    @property
    def bucket_nbytes(self) -> int:
        return self._buckets[0].nbytes

    @property
    def buckets(self) -> list[Bucket]:
        return self._buckets

    @property
    def sum_buckets(self) -> list[Bucket]:
        return []  # they are summed in place

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        return super().all_gather_rows(vector.to(self.device), what=what)  # also counts the bytes of host tensors

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        under_way = f"gather of unit {what!r}"
        with self._reaching(under_way):
            work = self._collect(full, shard)
        self.counters.add("gather", shard.nbytes * (self.num_ranks - 1), what)
        return Pending(partial(self._finish, work, under_way))

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        def work() -> None:
            if full.dtype is dtype:
                self._reduce_in_place(full, out, accumulate)
            else:
                self._reduce_in_pieces(full.view(self.num_ranks, -1), out, dtype, accumulate)

        self.counters.add("reduce", out.numel() * dtype.itemsize * (self.num_ranks - 1), what)
        return self.in_turn(lambda: work, full, what=what)

    def all_to_all(self, out: Tensor, given: Tensor, *, what: str) -> Pending:
        under_way = f"all-to-all of {what}"
        with self._reaching(under_way):
            work = dist.all_to_all_single(bytes_of(out), bytes_of(given), group=self.group, async_op=True)
        self.counters.add("exchange", given[1:].nbytes, what)
        return Pending(partial(self._finish, work, under_way))

    def in_turn(self, begin: Callable[[], Callable[[], None]], *held: Tensor, what: str) -> Pending:
        with self._reaching(f"reduce of unit {what!r}"):
            return Pending(self._streams.issue(self._stream, lambda: begin()(), *held))

    def _reduce_in_place(self, full: Tensor, out: Tensor, accumulate: bool) -> None:
        goes_there = not accumulate and out.dtype is full.dtype
        total = out if goes_there else full.view(self.num_ranks, -1)[self.rank]
        self._sum(full, total).wait()
        total.div_(self.num_ranks)
        if not goes_there:
            _put(out, total, accumulate)

    def _reduce_in_pieces(self, ranges: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
        """Casts summands of shape `(num_ranks, out.numel())` to the dtype of the sum and reduces them in pieces."""
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
        return _reduce_scatter(out, full, op=dist.ReduceOp.SUM, group=self.group, async_op=True)


def _put(target: Tensor, average: Tensor, accumulate: bool) -> None:
    if accumulate:
        target.add_(average)
    else:
        target.copy_(average)
