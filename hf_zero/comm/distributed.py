"""Collectives of `torch.distributed`: the small, rare ones, which all backends share, with the errors when one fails;
and a backend's own, in place, for NCCL and others that implement them well.

A backend runs its own on its own streams, ordered after the work that the current stream had when they were issued.

[Note: one communicator] All models over one set of ranks share one communicator. Kernels of two may run at the same
time, and each holds a part of the device while it waits for its peers: where one rank starts them in another order
than another rank does, both wait for ever. Shard groups need a second one, and then NCCL has to start kernels in the
order in which the host launches them, which is the same on all ranks: `NCCL_LAUNCH_ORDER_IMPLICIT=1`, from 2.26 on.
"""

import os
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Bucket, Comm, Messages, Pending
from hf_zero.comm.blockwise import PackedReduction, least_nbytes
from hf_zero.comm.streams import Streams
from hf_zero.errors import CommError, ConfigError, HfZeroError


# For how long a host waits for others to connect: they begin at the same time.
CONNECTING_SECONDS = 60.0
# So many ranks exchange small values in pairs, where each knows for whom it waits; more would be too many messages.
MAX_PAIRED_RANKS = 32
# Of the messages of small collectives, which are all in one order.
SMALL_TAG = 0x3FFFFFFE
# torch 2.13 deprecates the `_tensor` name; 2.11 does not have the new one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
LAUNCH_ORDER_VERSION = (2, 26)


class DistributedComm(Comm):
    """The small, rare collectives, which are the same for all `torch.distributed` backends.

    [Note: who does not answer] Of a collective, a backend says at best that it failed. Where gloo serves a group of
    `MAX_PAIRED_RANKS` at most, ranks send small values to one another instead, so that each waits for a rank that it
    knows.
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
        self._side_groups: dict[str, DistributedComm] = {}  # by purpose, as far as they were asked for

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
            with self._reaching("a barrier"):  # without a device torch takes the current one, and warns of it
                dist.barrier(self.group, device_ids=None if self.device.index is None else [self.device.index])

    def side_group(self, purpose: str) -> Comm:
        if purpose not in self._side_groups:
            members, limit = dist.get_process_group_ranks(self.group), timedelta(seconds=CONNECTING_SECONDS)
            try:
                group = ranks.make_group(members, timeout=min(limit, self._timeout), backend="gloo")
            except RuntimeError as error:
                interface = os.environ.get("GLOO_SOCKET_IFNAME", "(not set)")
                raise CommError(
                    f"connecting the hosts of the ranks by gloo: {str(error).partition(chr(10))[0]}; "
                    f"{ranks.route_to_master()}; GLOO_SOCKET_IFNAME={interface}: set it, on every host, to the "
                    "interface by which the hosts reach one another"
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
        # each text is read once, however many ranks send the same: they share the object, and nobody writes to it
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
        """The device whose memory objects are sent from."""
        return ranks.CPU if self._has_gloo else self.device

    def _gather_small(self, own: Tensor, what: str) -> Tensor:
        """Returns the 1-D tensors of all ranks in rank order, as the rows of one."""
        rows = own.new_empty(self.num_ranks, own.numel())
        is_on_gloo = self._has_gloo and own.is_cpu
        if is_on_gloo and self.num_ranks <= MAX_PAIRED_RANKS:
            receives = [(rows[rank], rank) for rank in reversed(self._other_ranks())]
            works = self._post(receives, [(own, rank) for rank in self._other_ranks()], SMALL_TAG, what)
            rows[self.rank].copy_(own)
            self._wait(works, what)
            return rows
        with self._reaching(what):
            if is_on_gloo or self._is_gloo:
                dist.all_gather(list(rows), own, group=self.group)
            else:
                ranks.gather_single(bytes_of(rows), bytes_of(own), group=self.group)
        return rows

    def _other_ranks(self) -> list[int]:
        """Returns all other ranks, beginning with the one after this rank."""
        return [(self.rank + distance) % self.num_ranks for distance in range(1, self.num_ranks)]

    def _post(self, receives: Messages, sends: Messages, tag: int, what: str) -> list[tuple[int, dist.Work]]:
        """Begins messages from and to other ranks, and returns them for `_wait`."""
        works = []
        for begin, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in messages:
                with self._reaching(what, peer):
                    works.append((peer, begin(tensor, self._peers[peer], group=self.group, tag=tag)))
        return works

    def _wait(self, works: list[tuple[int, dist.Work]], what: str) -> None:
        for peer, work in works:
            with self._reaching(what, peer):
                work.wait(self._timeout)

    @contextmanager
    def _reaching(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Turns an error of the backend into a `CommError` that names the rank. An error of this rank's own device is
        raised as it is."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            is_known = isinstance(error, (HfZeroError, torch.OutOfMemoryError, torch.AcceleratorError))
            # not all of gloo's errors can be told from others, which those of other backends can
            if is_known or not (self._is_gloo or ranks.is_of_transport(error)):
                raise
            raise self._failed(what, peer, error) from error

    def _failed(self, what: str, peer: int | None, error: BaseException | str) -> CommError:
        gone = set().union(*(ranks.closed_ranks(side_group.group) for side_group in self._side_groups.values()))
        return ranks.failure(what, self.group, error, peer=peer, gone=gone, seconds=self.timeout_seconds)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes. Values that are moved and not summed go as bytes, since gloo
    and NCCL know some dtypes only."""
    return tensor.view(-1).view(torch.uint8)


def refuse_unordered(setting: str, version: tuple[int, ...]) -> None:
    """Refuses a second communicator, for which a setting asks, where this version of NCCL would launch its kernels and
    those of the first in no common order. Raises [`ConfigError`]."""
    if version < LAUNCH_ORDER_VERSION or os.environ.get(LAUNCH_ORDER) != "1":
        raise ConfigError(
            f"{setting}: with NCCL {'.'.join(map(str, version))} and {LAUNCH_ORDER}="
            f"{os.environ.get(LAUNCH_ORDER, '(not set)')} two communicators may wait for each other for ever; set "
            f"{LAUNCH_ORDER}=1 for all ranks before they start, with NCCL 2.26 or newer, or leave the setting out"
        )


def communicator(group: dist.ProcessGroup, device: torch.device, seconds: float, purpose: str) -> dist.ProcessGroup:
    """Returns a process group of the same ranks, as `ranks.part_of` does, whose kernels go before those that compute
    where the backend knows priorities. Each exchange takes so many seconds at most."""
    options = None
    if device.type == "cuda" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=seconds)
    return ranks.part_of(group, range(dist.get_world_size(group)), seconds, purpose, pg_options=options)


class NativeComm(DistributedComm):
    """Collectives that call those of `torch.distributed` directly.

    [Note: what a reduction needs] Summands in the dtype of the sum are reduced where they lie. Others are cast on
    their way into one of two buckets, piece by piece: the same elements of every rank's range, which is what a
    reduce-scatter of them takes. One bucket is filled while the other travels. All of it is queued at once, on a
    stream of its own, so that neither the host nor what computes meanwhile waits for it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, bucket_nbytes: int):
        super().__init__(group, device, timeout_seconds)
        with self._reaching("connecting the ranks"):
            self.group = communicator(group, device, timeout_seconds, "collectives")
        self._streams = Streams(device)
        self._stream = self._streams.new()
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
        self.counters.add("gather", shard.nbytes * (self.num_ranks - 1), what)
        return Pending(partial(self._finish, work, under_way))

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, packs: bool = False
    ) -> Pending:
        with self._streams.behind(self._stream), self._reaching(f"reduce of unit {what!r}"):
            if packs:
                self._reduce_packed(full, out, accumulate, what)
            elif full.dtype is dtype:
                self._reduce_in_place(full, out, accumulate)
            else:
                self._reduce_in_pieces(full.view(self.num_ranks, -1), out, dtype, accumulate)
            done = self._streams.record(self._stream)
        if not packs:  # else the exchange has counted
            self.counters.add("reduce", out.numel() * dtype.itemsize * (self.num_ranks - 1), what)
        return Pending(partial(self._streams.wait, done))

    def _reduce_packed(self, full: Tensor, out: Tensor, accumulate: bool, what: str) -> None:
        least = least_nbytes(self.num_ranks)
        PackedReduction(
            full,
            out,
            rank=self.rank,
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
        return _reduce_scatter(out, full, op=dist.ReduceOp.SUM, group=self.group, async_op=True)


def _put(target: Tensor, average: Tensor, accumulate: bool) -> None:
    if accumulate:
        target.add_(average)
    else:
        target.copy_(average)
