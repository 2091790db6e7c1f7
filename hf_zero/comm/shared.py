"""Exchange among the ranks of one host through memory that all of them map: nothing is sent but short messages.

[Note: messages] A rank tells its peers where its values lie (READY), reads theirs when they are ready, and tells when
it has read them (DONE), after which the owner may write there again. All ranks begin their collectives in the same
order, so the n-th READY of each belongs together; a tag says which unit it is, to notice when they do not. BARRIER
says that a rank has come to a memory barrier, and how many collectives it had begun by then: as many as all others
had. MEMORY and COMMON introduce memory.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm.base import Pending
from hf_zero.comm.bucket import Bucket
from hf_zero.comm.pairwise import PairwiseComm, average, tag_of
from hf_zero.comm.peers import Kind, Peer, close, mapped
from hf_zero.comm.ranks import name_of
from hf_zero.errors import CommError


@dataclass(frozen=True)
class _Collective:
    """A collective under way: `take` is called with every rank's values, this one's included, in rank order."""

    number: int
    tag: int
    what: str
    own: Tensor
    take: Callable[[list[Tensor]], None]


class SharedComm(PairwiseComm):
    """Collectives among processes of one host. What does not lie in `empty` memory goes the pairwise way.

    Args:
        group, device, timeout_seconds, bucket_nbytes: as for `PairwiseComm`.
        connections (`dict[int, socket.socket]`): to every other rank, see `hf_zero.comm.rendezvous`.
    """

    shares_memory = True

    def __init__(self, group, device, timeout_seconds: float, bucket_nbytes: int, connections: dict):
        super().__init__(group, device, timeout_seconds, bucket_nbytes)
        self._others = [Peer(rank, connections[rank]) for rank in sorted(connections)]
        self._own: dict[int, tuple[int, Tensor]] = {}  # by address; kept, so that no address comes twice
        self._under_way: deque[_Collective] = deque()  # begun, the values not taken yet
        self._boards: list[Tensor] = []  # two, on which each rank has a row of bytes, used in turn
        self._num_begun = 0
        self._num_barriers = 0
        self._num_begun_at_barrier = 0  # the last
        self._tags: dict[int, str] = {}  # what the tags mean that were used so far
        weakref.finalize(self, close, list(connections.values()))

    @property
    def buckets(self) -> list[Bucket]:
        # the staging buffer is for what lies elsewhere: the engine's tensors do not
        return [bucket for bucket in super().buckets if bucket.memory is not None or bucket is self._scratch]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._new(Kind.MEMORY, numel, dtype)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.rank == 0:
            return self._new(Kind.COMMON, numel, dtype)
        first = self._others[0]
        self._receive_until(first, lambda peer: peer.common, "sharing memory")
        return first.memory[first.common.popleft()][: numel * dtype.itemsize].view(dtype)

    def memory_barrier(self) -> None:
        self._memory_barrier("a memory barrier")

    def read_common(self, full: Tensor, common: Tensor, *, what: str) -> None:
        full.copy_(common)
        others = common.numel() * (self.num_ranks - 1) // self.num_ranks
        self.counters.add("gather", others * common.element_size(), what)

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        if not self._is_shared(shard):
            return super().all_gather(full, shard, what=what)

        def take(shards: list[Tensor]) -> None:
            for place, values in zip(full.chunk(self.num_ranks), shards):
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)

        return self._begin("gather", what, shard, shard.numel(), take)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        if not self._is_shared(full):
            return super().reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what)
        numel, scratch = out.numel(), self._scratch_of(dtype)

        def take(fulls: list[Tensor]) -> None:
            summands = [values[self.rank * numel : (self.rank + 1) * numel] for values in fulls]
            average(summands, out, scratch, accumulate)

        return self._begin("reduce", what, full, numel, take)

    def all_gather_vector(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        nbytes = vector.numel() * vector.element_size()
        if not self._boards or self._boards[0].shape[1] < nbytes:
            numel = self.num_ranks * max(nbytes, 4096)
            self._boards = [self.common(numel, torch.uint8).view(self.num_ranks, -1) for _ in range(2)]
        self._boards.reverse()  # whoever still reads the last one has not come to this barrier
        rows = self._boards[0][:, :nbytes]
        rows[self.rank].copy_(vector.detach().contiguous().view(torch.uint8))
        self._memory_barrier(what)
        self.counters.add("scalar", nbytes * (self.num_ranks - 1))
        return rows.clone(memory_format=torch.contiguous_format).view(vector.dtype)

    def progress(self) -> None:
        while self._under_way:
            for peer in self._others:
                while not peer.ready:
                    if not self._receive_from(peer, 0.0, self._under_way[0].what):
                        return
            self._take_first()

    def _new(self, kind: Kind, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = max(1, numel * dtype.itemsize)
        descriptor = os.memfd_create("hf_zero", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        number = len(self._own)
        for peer in self._others:
            self._send_to(peer, kind, 0, number, nbytes, descriptor=descriptor)
        memory = mapped(descriptor, nbytes)
        self._own[memory.untyped_storage().data_ptr()] = number, memory
        return memory[: numel * dtype.itemsize].view(dtype)

    def _is_shared(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own

    def _memory_barrier(self, what: str) -> None:
        self._num_barriers += 1
        self._num_begun_at_barrier = self._num_begun
        for peer in self._others:
            self._send_to(peer, Kind.BARRIER, 0, 0, self._num_begun)
        for peer in self._others:
            self._receive_until(peer, lambda peer: peer.counts[Kind.BARRIER] >= self._num_barriers, what)

    def _begin(self, verb: str, what: str, own: Tensor, numel: int, take: Callable) -> Pending:
        tag, under_way = tag_of(verb, what), f"{verb} of unit {what!r}"
        self._tags[tag] = under_way
        number, _ = self._own[own.untyped_storage().data_ptr()]
        for peer in self._others:
            self._send_to(peer, Kind.READY, tag, number, own.storage_offset() * own.element_size())
        self._num_begun += 1
        collective = _Collective(self._num_begun, tag, under_way, own, take)
        self._under_way.append(collective)
        self.counters.add(verb, numel * own.element_size() * (self.num_ranks - 1), what)
        self.progress()
        return Pending(partial(self._finish, collective))

    def _finish(self, collective: _Collective) -> None:
        """Returns when this rank has what it needs and the others have read what they need from it."""
        self.progress()
        while self._under_way and self._under_way[0].number <= collective.number:
            for peer in self._others:
                self._receive_until(peer, lambda peer: peer.ready, self._under_way[0].what)
            self._take_first()
        for peer in self._others:
            self._receive_until(peer, lambda peer: peer.counts[Kind.DONE] >= collective.number, collective.what)

    def _take_first(self) -> None:
        """Serves the oldest collective under way: all ranks are ready."""
        collective = self._under_way.popleft()
        own, values = collective.own, {self.rank: collective.own}
        for peer in self._others:
            tag, number, offset = peer.ready.popleft()
            if tag != collective.tag:
                raise self._out_of_step(collective.what, peer, self._tags.get(tag))
            there = peer.memory[number][offset : offset + own.numel() * own.element_size()]
            values[peer.rank] = there.view(own.dtype)
        collective.take([values[rank] for rank in range(self.num_ranks)])
        for peer in self._others:
            self._send_to(peer, Kind.DONE)

    def _send_to(self, peer: Peer, kind: Kind, *numbers: int, descriptor: int | None = None) -> None:
        while not self._try_to_send(peer, kind, *numbers, descriptor=descriptor):
            for other in self._others:  # it may be waiting for room as well: make some
                self._receive_from(other, 0.001, "sending")

    def _try_to_send(self, peer: Peer, kind: Kind, *numbers: int, descriptor: int | None) -> bool:
        try:
            return peer.send(kind, *numbers, descriptor=descriptor)
        except OSError as error:
            raise self._failed("sending", peer.rank, error) from error

    def _receive_until(self, peer: Peer, is_there: Callable[[Peer], object], what: str) -> None:
        self._refuse_out_of_step(peer, what)
        while not is_there(peer):
            if not self._receive_from(peer, self.timeout_seconds, what):
                raise self._failed(what, peer.rank, "timed out")
            self._refuse_out_of_step(peer, what)

    def _receive_from(self, peer: Peer, seconds: float, what: str) -> bool:
        try:
            return peer.receive(seconds)
        except OSError as error:
            raise self._failed(what, peer.rank, error) from error

    def _refuse_out_of_step(self, peer: Peer, what: str) -> None:
        """Refuses a rank that begins other collectives: between two barriers all ranks begin equally many."""
        num_barriers = peer.counts[Kind.BARRIER]
        if num_barriers < self._num_barriers:  # this rank waits for it at a memory barrier
            if peer.counts[Kind.READY] > self._num_begun:
                raise self._out_of_step(what, peer, self._tags.get(peer.ready[-1][0]))
        elif num_barriers > self._num_barriers:  # it waits for this rank
            if self._num_begun > peer.num_begun_at_barrier:
                raise self._out_of_step(what, peer, "a memory barrier")
        elif self._num_begun_at_barrier != peer.num_begun_at_barrier:
            raise self._out_of_step(what, peer, "this barrier with other collectives behind it")

    def _out_of_step(self, what: str, peer: Peer, there: str | None) -> CommError:
        there = there or "another unit or step"
        return CommError(
            f"{what}: {name_of(self.group, peer.rank)} has come to {there}; the ranks do not run the same program; "
            "look at its log first"
        )
