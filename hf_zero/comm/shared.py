"""Collectives among ranks of one host through memory that all of them map. Only short messages are sent; see [Note:
messages] in `hf_zero.comm.peers`."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm.base import Counters, Pending
from hf_zero.comm.pairwise import PairwiseComm, average, tag_of
from hf_zero.comm.peers import Kind, Peers, mapped


class HostMemory:
    """Memory of this host that all ranks map: shared memory, or one rank's memory that the others read. Reads count as
    sent bytes."""

    def __init__(self, rank: int, num_ranks: int, peers: Peers, counters: Counters):
        self._rank = rank
        self._num_ranks = num_ranks
        self._peers = peers
        self._counters = counters
        self._own: dict[int, tuple[int, Tensor]] = {}  # by address; kept alive, so that addresses are unique

    def own(self, numel: int, dtype: torch.dtype, kind: Kind = Kind.MEMORY) -> Tensor:
        """Allocates memory, 1-D and zero-filled, that this rank writes and others read. It lives as long as this
        object."""
        nbytes = max(1, numel * dtype.itemsize)
        descriptor = os.memfd_create("hf_zero", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        number = len(self._own)
        self._peers.send(kind, 0, number, nbytes, descriptor=descriptor)
        memory = mapped(descriptor, nbytes)
        self._own[memory.untyped_storage().data_ptr()] = number, memory
        return memory[: numel * dtype.itemsize].view(dtype)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates shared memory, 1-D and zero-filled. Collective. Between two barriers, an element has either one
        writer or any number of readers."""
        if self._rank == 0:
            return self.own(numel, dtype, Kind.COMMON)
        first = self._peers.all[0]
        self._peers.receive_until(first, lambda peer: peer.common, "sharing memory")
        return first.memory[first.common.popleft()][: numel * dtype.itemsize].view(dtype)

    def read(self, full: Tensor, common: Tensor, *, what: str) -> None:
        """Copies shared memory into `full`, casting if the dtypes differ. `what` is the name of the unit."""
        full.copy_(common)
        others = common.numel() * (self._num_ranks - 1) // self._num_ranks
        self._counters.add("gather", others * common.element_size(), what)

    def barrier(self, what: str = "a memory barrier") -> None:
        """Waits until all ranks have called it. Afterwards, all ranks can read what any of them wrote before."""
        self._peers.barrier(what)

    def number_of(self, tensor: Tensor) -> int | None:
        """Returns the number by which other ranks know a tensor's memory, or `None` if they do not map it."""
        number, _ = self._own.get(tensor.untyped_storage().data_ptr(), (None, None))
        return number


@dataclass(frozen=True)
class _Collective:
    """A collective in progress: `take` is called with the values of all ranks, in rank order."""

    number: int
    tag: int
    what: str
    own: Tensor
    take: Callable[[list[Tensor]], None]


class SharedComm(PairwiseComm):
    """Collectives among processes of one host. Tensors that were not allocated by `empty` are exchanged in pairs.
    `connections` are the sockets to all other ranks, see `hf_zero.comm.rendezvous`."""

    shared_memory: HostMemory

    def __init__(self, group, device, timeout_seconds: float, bucket_nbytes: int, connections: dict):
        super().__init__(group, device, timeout_seconds, bucket_nbytes)
        self._host_peers = Peers(group, timeout_seconds, connections)
        self.shared_memory = HostMemory(self.rank, self.num_ranks, self._host_peers, self.counters)
        self._under_way: deque[_Collective] = deque()  # started, but values not read yet
        self._boards: list[Tensor] = []  # two, used alternately, with one row of bytes per rank

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.shared_memory.own(numel, dtype)

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        if (number := self.shared_memory.number_of(shard)) is None:
            return super().all_gather(full, shard, what=what)

        def take(shards: list[Tensor]) -> None:
            for place, values in zip(full.chunk(self.num_ranks), shards):
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)

        return self._begin("gather", what, shard, number, shard.numel(), take)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        if (number := self.shared_memory.number_of(full)) is None:
            return super().reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what)
        numel, scratch = out.numel(), self._scratch_of(dtype)

        def take(fulls: list[Tensor]) -> None:
            summands = [values[self.rank * numel : (self.rank + 1) * numel] for values in fulls]
            average(summands, out, scratch, accumulate)

        return self._begin("reduce", what, full, number, numel, take)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        nbytes = vector.nbytes
        if not self._boards or self._boards[0].shape[1] < nbytes:
            numel = self.num_ranks * max(nbytes, 4096)
            boards = [self.shared_memory.common(numel, torch.uint8) for _ in range(2)]
            self._boards = [board.view(self.num_ranks, -1) for board in boards]
        self._boards.reverse()  # a rank that still reads the last board has not reached this barrier
        rows = self._boards[0][:, :nbytes]
        rows[self.rank].copy_(vector.detach().contiguous().view(torch.uint8))
        self.shared_memory.barrier(what)
        self.counters.add("scalar", nbytes * (self.num_ranks - 1))
        return rows.clone(memory_format=torch.contiguous_format).view(vector.dtype)

    def progress(self) -> None:
        while self._under_way:
            for peer in self._host_peers.all:
                while not peer.ready:
                    if not self._host_peers.receive(peer, 0.0, self._under_way[0].what):
                        return
            self._take_first()

    def _begin(self, verb: str, what: str, own: Tensor, number: int, numel: int, take: Callable) -> Pending:
        """Starts a collective on the memory `number`, of which each rank reads `numel` elements."""
        tag, under_way = tag_of(verb, what), f"{verb} of unit {what!r}"
        self._host_peers.begin(tag, under_way, number, own.storage_offset() * own.element_size())
        collective = _Collective(self._host_peers.num_begun, tag, under_way, own, take)
        self._under_way.append(collective)
        self.counters.add(verb, numel * own.element_size() * (self.num_ranks - 1), what)
        self.progress()
        return Pending(partial(self._finish, collective))

    def _finish(self, collective: _Collective) -> None:
        """Waits until this rank has read its values and the others have read theirs."""
        self.progress()
        while self._under_way and self._under_way[0].number <= collective.number:
            for peer in self._host_peers.all:
                self._host_peers.receive_until(peer, lambda peer: peer.ready, self._under_way[0].what)
            self._take_first()
        for peer in self._host_peers.all:
            self._host_peers.receive_until(
                peer, lambda peer: peer.counts[Kind.DONE] >= collective.number, collective.what
            )

    def _take_first(self) -> None:
        """Executes the oldest collective in progress, for which all ranks are ready. It is removed from the queue only
        at the end, so that an interrupted one does not count as done."""
        collective = self._under_way[0]
        own, values = collective.own, {self.rank: collective.own}
        for peer in self._host_peers.all:
            tag, number, offset = peer.ready[0]
            if tag != collective.tag:
                raise self._host_peers.out_of_step(collective.what, peer, tag)
            there = peer.memory[number][offset : offset + own.nbytes]
            values[peer.rank] = there.view(own.dtype)
        collective.take([values[rank] for rank in range(self.num_ranks)])
        self._under_way.popleft()
        for peer in self._host_peers.all:
            peer.ready.popleft()
        self._host_peers.send(Kind.DONE)
