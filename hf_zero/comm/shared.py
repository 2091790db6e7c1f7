"""Collectives among ranks of one host through memory that all of them map. Only short messages are sent; see [Note:
messages] in `hf_zero.comm.peers`."""

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO

import torch
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Pending
from hf_zero.comm.pairwise import PairwiseComm, average, tag_of
from hf_zero.comm.peers import Kind, Peer, anonymous_file, close, mapped
from hf_zero.errors import CommError


logger = logging.getLogger(__name__)

# After this time, a waiting rank logs whom it is waiting for, long before the timeout.
PATIENCE_SECONDS = 60.0
Take = Callable[[list[Tensor]], object]


@dataclass(frozen=True)
class _Collective:
    """A collective in progress: `take` is called with the values of all ranks, in rank order. It is `None` for a
    barrier."""

    number: int
    tag: int
    what: str
    own: Tensor
    take: Take | None


class SharedComm(PairwiseComm):
    """Collectives among processes of one host. Tensors that were not allocated by `empty` are exchanged in pairs.
    `peers` are the connections to all other ranks, see `hf_zero.comm.peers`. Reads of their memory count as sent
    bytes."""

    def __init__(self, group, device, timeout_seconds: float, bucket_nbytes: int, peers: list[Peer]):
        super().__init__(group, device, timeout_seconds, bucket_nbytes)
        self._mapping_peers = peers
        self._own: dict[int, tuple[int, Tensor]] = {}  # by address; kept alive, so that addresses are unique
        self._nothing = torch.empty(0, dtype=torch.uint8)
        # the files of memory that a peer may not have mapped yet, with the number of collectives started before it
        self._files: deque[tuple[int, FileIO]] = deque()
        self._num_begun = 0  # collectives
        self._under_way: deque[_Collective] = deque()  # started, but values not read yet
        self._tags: dict[int, str] = {}  # descriptions of the tags used so far
        self._boards: list[Tensor] = []  # two, used alternately, with one row of bytes per rank
        weakref.finalize(self, _close, peers, self._files)

    @property
    def shared_memory(self) -> "SharedComm":
        return self

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = max(1, numel * dtype.itemsize)
        file = anonymous_file(nbytes)
        self._files.append((self._num_begun, file))
        memory, number = mapped(os.getpid(), file.fileno(), nbytes), len(self._own) + 1
        self._send(Kind.MEMORY, number, file.fileno(), nbytes)
        self._own[memory.untyped_storage().data_ptr()] = number, memory
        return memory[: numel * dtype.itemsize].view(dtype)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates memory that all ranks share, 1-D and zero-filled. Collective. Between two barriers, an element has
        either one writer or any number of readers."""
        own = self.empty(numel, dtype) if self.rank == 0 else torch.empty(numel, dtype=dtype, device="meta")
        memory: list[Tensor] = []
        self._finish(self._start("sharing memory", own, memory.extend))
        return memory[0]

    def read(self, full: Tensor, common: Tensor, *, what: str) -> None:
        """Copies shared memory into `full`, casting if the dtypes differ. `what` is the name of the unit."""
        full.copy_(common)
        others = common.numel() * (self.num_ranks - 1) // self.num_ranks
        self.counters.add("gather", others * common.element_size(), what)

    def barrier(self, what: str = "a barrier") -> None:
        """Waits until all ranks have called it. Afterwards, all ranks can read what any of them wrote before. `what`
        names it in error messages."""
        self._take_until(self._start(what, self._nothing, None))

    def _maps(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory allocated by `empty`, which all ranks map."""
        return tensor.untyped_storage().data_ptr() in self._own

    # Collectives

    def all_gather(self, full: Tensor, shard: Tensor, *, what: str) -> Pending:
        if not self._maps(shard):
            return super().all_gather(full, shard, what=what)

        def take(shards: list[Tensor]) -> None:
            for place, values in zip(full.chunk(self.num_ranks), shards):
                if place.data_ptr() != values.data_ptr():
                    place.copy_(values)

        return self._begin("gather", what, shard, shard.numel(), take)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, dtype: torch.dtype, accumulate: bool, what: str) -> Pending:
        if not self._maps(full):
            return super().reduce_scatter(full, out, dtype=dtype, accumulate=accumulate, what=what)
        numel, scratch = out.numel(), self._scratch_of(dtype)

        def take(fulls: list[Tensor]) -> None:
            summands = [values[self.rank * numel : (self.rank + 1) * numel] for values in fulls]
            average(summands, out, scratch, accumulate)

        return self._begin("reduce", what, full, numel, take)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        nbytes = vector.nbytes
        if not self._boards or self._boards[0].shape[1] < nbytes:
            numel = self.num_ranks * max(nbytes, 4096)
            self._boards = [self.common(numel, torch.uint8).view(self.num_ranks, -1) for _ in range(2)]
        rows = self._boards[0][:, :nbytes]
        rows[self.rank].copy_(vector.detach().contiguous().view(torch.uint8))
        self.barrier(f"{what} ({nbytes} bytes)")
        self.counters.add("scalar", nbytes * (self.num_ranks - 1))
        found = rows.clone(memory_format=torch.contiguous_format).view(vector.dtype)
        self._boards.reverse()  # a rank that still reads this board has not reached the next barrier
        return found

    def progress(self) -> None:
        while self._under_way:
            for peer in self._mapping_peers:
                while not peer.ready:
                    if not self._receive(peer, 0.0, self._under_way[0].what):
                        return
                self._refuse_out_of_step(peer)
            self._take_first()

    def _begin(self, verb: str, what: str, own: Tensor, numel: int, take: Take) -> Pending:
        """Starts a collective on memory of this rank, of which each rank reads `numel` elements."""
        self.counters.add(verb, numel * own.element_size() * (self.num_ranks - 1), what)
        return Pending(partial(self._finish, self._start(f"{verb} of unit {what!r}", own, take)))

    def _start(self, what: str, own: Tensor, take: Take | None) -> _Collective:
        """Starts a collective on `own`, which is in memory allocated by `empty` if other ranks read it. `what` names
        it in error messages."""
        tag = tag_of(what)
        self._tags[tag] = what
        number, _ = self._own.get(own.untyped_storage().data_ptr(), (0, None))
        self._num_begun += 1
        collective = _Collective(self._num_begun, tag, what, own, take)
        self._under_way.append(collective)  # before the message, so that an interrupt leaves no message without it
        self._send(Kind.READY, tag, number, own.storage_offset() * own.element_size())
        self.progress()
        return collective

    def _take_until(self, collective: _Collective) -> None:
        """Waits until this rank has read the values of a collective and of those before it."""
        while self._under_way and self._under_way[0].number <= collective.number:
            for peer in self._mapping_peers:
                self._wait_for(peer, lambda peer: peer.ready, self._under_way[0].what)
                self._refuse_out_of_step(peer)
            self._take_first()

    def _finish(self, collective: _Collective) -> None:
        """Waits until this rank has read its values and the others have read theirs."""
        self._take_until(collective)
        for peer in self._mapping_peers:
            self._wait_for(peer, lambda peer: peer.num_done >= collective.number, collective.what)
        while self._files and self._files[0][0] < collective.number:  # the peers have mapped them
            self._files.popleft()[1].close()

    def _take_first(self) -> None:
        """Executes the oldest collective in progress, for which all ranks are ready. It is removed from the queue only
        at the end, so that an interrupted one does not count as done."""
        collective = self._under_way[0]
        if collective.take is not None:
            own, values = collective.own, {self.rank: collective.own}
            for peer in self._mapping_peers:
                _, number, offset = peer.ready[0]
                values[peer.rank] = peer.memory[number][offset : offset + own.nbytes].view(own.dtype)
            collective.take([values[rank] for rank in range(self.num_ranks)])
        self._under_way.popleft()
        for peer in self._mapping_peers:
            peer.ready.popleft()
        if collective.take is not None:
            self._send(Kind.DONE, collective.number, 0, 0)

    # Messages

    def _send(self, kind: Kind, *numbers: int) -> None:
        """Sends a message to every other rank."""
        for peer in self._mapping_peers:
            while not peer.send(kind, *numbers):
                for other in self._mapping_peers:  # it may be blocked in sending as well: receive to make room
                    self._receive(other, 0.001, "sending")

    def _wait_for(self, peer: Peer, is_there: Callable[[Peer], object], what: str) -> None:
        """Receives messages from a rank until the expected one has arrived. Raises [`CommError`] on timeout."""
        first = min(PATIENCE_SECONDS, self.timeout_seconds)
        while not is_there(peer):
            if self._receive(peer, first, what):
                continue
            if first < self.timeout_seconds:
                logger.warning(
                    "hf_zero: %s: has waited %g s for %s, and will wait for up to %g s; either that rank is busy, or "
                    "the ranks do not all call the same collective functions, such as saving or generating",
                    *(what, first, ranks.name_of(self.group, peer.rank), self.timeout_seconds),
                )
            if not self._receive(peer, self.timeout_seconds - first, what):
                raise self._failed(what, peer.rank, "timed out")

    def _receive(self, peer: Peer, seconds: float, what: str) -> bool:
        """Receives a message like `Peer.receive`; `what` names the work in error messages."""
        try:
            return peer.receive(seconds)
        except OSError as error:
            raise self._failed(what, peer.rank, error) from error

    def _refuse_out_of_step(self, peer: Peer) -> None:
        """Raises if a rank is ready for another collective than the oldest one in progress here."""
        collective, (tag, *_) = self._under_way[0], peer.ready[0]
        if tag != collective.tag:
            there = self._tags.get(tag, "another unit or step")
            raise CommError(
                f"{collective.what}: {ranks.name_of(self.group, peer.rank)} is at {there}; the ranks do not run the "
                "same program; look at its log first"
            )


def _close(peers: list[Peer], files: deque[tuple[int, FileIO]]) -> None:
    for peer in peers:
        close(peer.pipes)
    close(file for _, file in files)
