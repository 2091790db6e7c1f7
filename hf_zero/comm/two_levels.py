"""Collectives among ranks of several hosts. Those of one host share memory, so what leaves a host leaves it once.

[Note: counterparts] Ranks that have the same place on their hosts, which have as many each, are counterparts. Only
they send messages; `docs/design.md` has the ways. The sum over the ranks of a host comes first, that over the hosts
last. Both are trees (`average`). Where a host has 2, 4, 8 ranks, one behind the other, that is the order of the tree
over all ranks: no bit depends on who is where.
"""

from collections.abc import Callable, Generator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.base import DONE, Pending
from hf_zero.comm.blockwise import BLOCK_NUMEL, PackedReduction, least_nbytes, packed_nbytes
from hf_zero.comm.pairwise import PairwiseComm, average, tag_of
from hf_zero.comm.peers import Kind, Peer, Peers
from hf_zero.comm.shared import HostMemory
from hf_zero.errors import CommError


# Tells whether something has happened, and waits for it when asked to.
Condition = Callable[[bool], bool]
# The work of a collective. It yields what has to happen before it goes on.
Steps = Generator[Condition, None, None]


class _UnderWay:
    """A collective under way, with the tag of the unit and what is done with it."""

    def __init__(self, tag: int, steps: Steps):
        self.tag = tag
        self._steps = steps
        self._needed = next(steps, None)

    def advance(self, *, waits: bool) -> bool:
        """Works as far as possible. Returns whether all is done."""
        while self._needed is not None and self._needed(waits):
            self._needed = self._refuse  # unless the next step comes to its end
            self._needed = next(self._steps, None)
        return self._needed is None

    def _refuse(self, waits: bool) -> bool:
        raise CommError(
            "a collective among several hosts: an exception broke it off on this rank, so the ranks are out of step; "
            "start them anew, from the last checkpoint"
        )


class TwoLevelComm(PairwiseComm):
    """Collectives among gloo's ranks of several hosts, see [Note: counterparts]. Tensors that do not lie in memory
    from `empty` are exchanged in pairs. `connections`: to every other rank of this host, see
    `hf_zero.comm.rendezvous`. `hosts`: the ranks of each host, as many on each."""

    reads_gathered = True

    def __init__(self, group, device, timeout_seconds: float, bucket_nbytes: int, connections: dict, hosts: list):
        super().__init__(group, device, timeout_seconds, bucket_nbytes)
        self._neighbours = Peers(group, timeout_seconds, connections)
        self._memory = HostMemory(self.rank, self.num_ranks, self._neighbours, self.counters)
        own = next(ranks for ranks in hosts if self.rank in ranks)
        # of each rank of this host: itself and its counterparts, in the order of the hosts
        self._columns = {rank: [ranks[place] for ranks in hosts] for place, rank in enumerate(own)}
        self._others = [rank for rank in self._columns[self.rank] if rank != self.rank]
        self._under_way: list[_UnderWay] = []  # in the order in which all ranks have begun them

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory.own(numel, dtype)

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        if self._memory.number_of(full) is None:
            return super().all_gather(full, shard, what=what)
        tag = tag_of("gather", what)
        nbytes = shard.nbytes
        self._count("gather", what, nbytes, nbytes)
        return self._begin(tag, self._gather(full, shard, tag, f"gather of unit {what!r}"))

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str, bits: int | None = None
    ) -> Pending:
        if self._memory.number_of(full) is None:
            return super().reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what, bits=bits)
        sent_nbytes = out.numel() * dtype.itemsize if bits is None else packed_nbytes(out.numel(), bits)
        self._count("reduce", what, out.numel() * full.element_size(), sent_nbytes)
        # sums are sent once neighbours have theirs, so those of several models in one loss would meet
        scratch, tag = self._scratch_of(dtype), tag_of(f"reduce {self._number}", what)
        finish = partial(average, scratch=scratch, accumulate=accumulate, count=self.num_ranks)
        if dtype is full.dtype and bits is None:
            return self._begin(tag, self._reduce(full, out, scratch, finish, tag, f"reduce of unit {what!r}"))
        self._reducing.wait()  # one at a time has the staging buffer
        if bits is None:
            steps = self._reduce_in_pieces(full, out, scratch, finish, tag, f"reduce of unit {what!r}")
        else:
            make = partial(PackedReduction, bits=bits, accumulate=accumulate, count=self.num_ranks)
            steps = self._reduce_sums_packed(full, out, scratch, make, tag, f"reduce of unit {what!r}")
        self._reducing = self._begin(tag, steps)
        return self._reducing

    def progress(self) -> None:
        passed = set()
        for collective in list(self._under_way):
            # of one tag none overtakes another
            if collective.tag in passed or not collective.advance(waits=False):
                passed.add(collective.tag)
            else:
                self._under_way.remove(collective)

    def finish_gathers(self) -> None:
        if self._under_way:
            self._finish(self._under_way[-1])

    def _begin(self, tag: int, steps: Steps) -> Pending:
        collective = _UnderWay(tag, steps)
        self._under_way.append(collective)
        self.progress()
        return Pending(partial(self._finish, collective))

    def _finish(self, collective: _UnderWay) -> None:
        """Finishes a collective, and first all that were begun before it. As every rank does so, none waits for
        another that waits."""
        self.progress()
        while collective in self._under_way:
            self._under_way[0].advance(waits=True)
            del self._under_way[0]

    def _gather(self, full: Tensor, shard: Tensor, tag: int, what: str) -> Steps:
        own = self._range(full, self.rank)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        receives = [(self._range(full, rank), rank) for rank in self._others]
        yield self._have_come(self._post(receives, [(own, rank) for rank in self._others], tag, what), what)
        fulls = yield from self._ready(full, tag, what)
        for neighbour, column in self._columns.items():
            for rank in column if neighbour != self.rank else ():
                self._range(full, rank).copy_(self._range(fulls[neighbour], rank))
        yield from self._read(tag, what)

    def _gather_within(self, full: Tensor, shard: Tensor, tag: int, what: str) -> Steps:
        own = full.chunk(len(self._columns))[list(self._columns).index(self.rank)]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        fulls = yield from self._ready(full, tag, what)
        for place, (rank, values) in enumerate(fulls.items()):
            if rank != self.rank:
                full.chunk(len(fulls))[place].copy_(values.chunk(len(fulls))[place])
        yield from self._read(tag, what)

    def _reduce(self, full: Tensor, out: Tensor, scratch: Tensor, finish: Callable, tag: int, what: str) -> Steps:
        """Adds up in the memory of the summands. This rank alone reads its column of them."""
        fulls = yield from self._ready(full, tag, what)
        for rank in self._columns[self.rank]:
            summands = [self._range(values, rank) for values in fulls.values()]
            average(summands, self._range(full, rank), scratch, accumulate=False, count=1)
        works = self._post([], [(self._range(full, rank), rank) for rank in self._others], tag, what)
        yield from self._read(tag, what)
        # the column of a neighbour, which has read it, is free for the sums that come
        free = next(column for rank, column in self._columns.items() if rank != self.rank)
        sums = {rank: self._range(full, place) for rank, place in zip(self._columns[self.rank], free)}
        sums[self.rank] = self._range(full, self.rank)
        works += self._post([(sums[rank], rank) for rank in self._others], [], tag, what)
        yield self._have_come(works, what)
        finish(list(sums.values()), out)

    def _reduce_in_pieces(
        self, full: Tensor, out: Tensor, scratch: Tensor, finish: Callable, tag: int, what: str
    ) -> Steps:
        """Adds up in another dtype than that of the summands, so sums are staged."""
        fulls = yield from self._ready(full, tag, what)
        column, num_hosts = self._columns[self.rank], len(self._others) + 1
        for start, stop in self._staging.pieces(out.numel(), 2 * num_hosts, scratch.dtype):
            rows = self._staging.rows(2 * num_hosts, stop - start, scratch.dtype)
            sums, own = dict(zip(column, rows)), dict(zip(column, rows[num_hosts:]))
            for rank, place in own.items():
                summands = [self._range(values, rank)[start:stop] for values in fulls.values()]
                average(summands, place, scratch, accumulate=False, count=1)
            receives, sends = ([(rows[rank], rank) for rank in self._others] for rows in (sums, own))
            yield self._have_come(self._post(receives, sends, tag, what), what)
            sums[self.rank] = own[self.rank]
            finish(list(sums.values()), out[start:stop])
        yield from self._read(tag, what)

    def _reduce_sums_packed(
        self, full: Tensor, out: Tensor, scratch: Tensor, make: Callable[..., PackedReduction], tag: int, what: str
    ) -> Steps:
        """Adds up exactly what the ranks of this host have, and sends the sums in few bits."""
        fulls = yield from self._ready(full, tag, what)
        column = self._columns[self.rank]
        works: list[tuple[int, dist.Work]] = []

        def exchange(sends: list, receives: list) -> Pending:
            works[:] = self._post(receives, sends, tag, what)
            return DONE

        sums_nbytes = len(column) * BLOCK_NUMEL * scratch.itemsize
        block_nbytes = sums_nbytes + least_nbytes(len(column), 8)
        memory = self._staging.rows(1, max(self._staging.nbytes, block_nbytes), torch.uint8)[0]
        num_blocks = memory.numel() // block_nbytes
        for part in out.split(num_blocks * BLOCK_NUMEL):
            start = part.storage_offset() - out.storage_offset()
            sums = memory[: len(column) * part.numel() * scratch.itemsize].view(scratch.dtype).view(len(column), -1)
            for rank, place in zip(column, sums):
                summands = [self._range(values, rank)[start : start + part.numel()] for values in fulls.values()]
                average(summands, place, scratch, accumulate=False, count=1)
            there = memory[num_blocks * sums_nbytes :]
            packed = make(sums.view(-1), part, members=column, rank=self.rank, exchange=exchange, memory=[there])
            yield self._have_come(list(works), what)
            packed.finish()
        yield from self._read(tag, what)

    def _ready(self, full: Tensor, tag: int, what: str) -> Generator[Condition, None, dict[int, Tensor]]:
        """Tells the ranks of this host that they may read `full`. Returns theirs and this one, in rank order."""
        number = self._memory.number_of(full)
        assert number is not None, "other memory takes the way of PairwiseComm"
        self._neighbours.begin(tag, what, number, full.storage_offset() * full.element_size())
        yield self._all_neighbours(lambda peer: peer.is_ready(tag), what)
        fulls = {self.rank: full}
        for peer in self._neighbours.all:
            number, offset = peer.take_ready(tag)
            theirs = peer.memory[number][offset : offset + full.nbytes]
            fulls[peer.rank] = theirs.view(full.dtype)
        return {rank: fulls[rank] for rank in self._columns}

    def _read(self, tag: int, what: str) -> Steps:
        """Tells the ranks of this host that this one has read theirs, and comes back when they have read its."""
        self._neighbours.send(Kind.DONE, tag, 0, 0)
        yield self._all_neighbours(lambda peer: peer.done[tag] > 0, what)
        for peer in self._neighbours.all:
            peer.done[tag] -= 1

    def _all_neighbours(self, is_there: Callable[[Peer], bool], what: str) -> Condition:
        """Whether the message of each rank of this host is there."""

        def holds(waits: bool) -> bool:
            for peer in self._neighbours.all:
                if waits:
                    self._neighbours.receive_until(peer, is_there, what)
                while not is_there(peer):
                    if not self._neighbours.receive(peer, 0.0, what):
                        return False
            return True

        return holds

    def _have_come(self, works: list, what: str) -> Condition:
        """Whether messages have gone and come, which gloo tells only those who wait."""

        def holds(waits: bool) -> bool:
            if waits:
                self._wait(works, what)
            return waits

        return holds

    def _range(self, full: Tensor, rank: int) -> Tensor:
        numel = full.numel() // self.num_ranks
        return full[rank * numel : (rank + 1) * numel]

    def _count(self, verb: str, what: str, read_nbytes: int, sent_nbytes: int) -> None:
        """Counts what a rank reads of each range from its neighbours' memory, and what it sends to counterparts."""
        num_hosts = len(self._others) + 1
        num_read = (len(self._columns) - 1) * num_hosts
        self.counters.add(verb, num_read * read_nbytes + (num_hosts - 1) * sent_nbytes, what)
