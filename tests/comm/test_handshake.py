"""READY and DONE, message by message: one rank in this process, and a test that plays the other.

Whenever the rank listens, the other one does the next thing of its part, and looks at what the rank has said by then.
So nothing depends on who is faster.
"""

import os
import socket
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import shared
from hf_zero.comm.base import Pending
from hf_zero.comm.peers import _MESSAGE, Kind, Peer
from hf_zero.comm.shared import SharedComm
from hf_zero.errors import CommError
from tests.comm.test_collectives import CPU


pytestmark = pytest.mark.quick


NUMEL = 4  # of a rank's range


class Other:
    """Rank 1, as far as it is a socket and memory."""

    def __init__(self, connection: socket.socket):
        self._peer = Peer(0, connection)
        self._part: list[Callable[[], None]] = []
        self.heard: list[Kind] = []
        self.memory: torch.Tensor | None = None

    def plays(self, *part: Callable[[], None]) -> None:
        """What it will do, one act whenever the rank listens in vain."""
        self._part = list(part)

    @property
    def is_over(self) -> bool:
        return not self._part

    def act(self) -> None:
        assert self._part, "the rank waits for something that nobody owes it"
        self._part.pop(0)()

    def listen(self) -> list[Kind]:
        """What the rank has said since it was last asked."""
        new = []
        while True:
            try:
                message = self._peer.socket.recv(_MESSAGE.size)
            except BlockingIOError:
                self.heard += new
                return new
            new.append(Kind(_MESSAGE.unpack(message)[0]))

    def shows(self, values: torch.Tensor) -> Callable[[], None]:
        """Brings memory with these values, and is ready."""

        def act() -> None:
            descriptor = os.memfd_create("other")
            os.write(descriptor, values.numpy().tobytes())
            self._peer.send(Kind.MEMORY, 0, 0, values.nbytes, descriptor=descriptor)
            os.close(descriptor)
            self.is_ready("reduce", "u")()

        return act

    def is_ready(self, verb: str, what: str) -> Callable[[], None]:
        return lambda: self._peer.send(Kind.READY, shared.tag_of(verb, what), 0, 0)

    def comes_to_a_barrier(self, num_begun: int) -> Callable[[], None]:
        return lambda: self._peer.send(Kind.BARRIER, 0, 0, num_begun)

    def has_read(self) -> None:
        self._peer.send(Kind.DONE)


@pytest.fixture
def pair(monkeypatch) -> Iterator[tuple[SharedComm, Other]]:
    """Rank 0 of two, and the other one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    comm, other = SharedComm(dist.group.WORLD, CPU, 60.0, 2**20, {1: ends[0]}), Other(ends[1])
    receive = Peer.receive

    def listen_or_let_act(self, seconds: float) -> bool:
        while not receive(self, 0.0):
            if not seconds:
                return False
            other.act()
        return True

    monkeypatch.setattr(Peer, "receive", listen_or_let_act)
    yield comm, other
    ends[1].close()
    dist.destroy_process_group()


def _begin(comm: SharedComm) -> tuple[torch.Tensor, torch.Tensor, Pending]:
    full, out = comm.empty(2 * NUMEL, torch.float32), torch.zeros(NUMEL)
    full.fill_(2.0)
    return full, out, comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="u")


def test_done_is_told_when_the_values_are_read_and_not_before(pair, monkeypatch):
    comm, other = pair
    full, out, pending = _begin(comm)
    assert other.listen()[-1] is Kind.READY and Kind.DONE not in other.heard
    values = torch.full((2 * NUMEL,), 4.0)
    average = shared.average

    def reading(summands, *rest):
        assert other.listen() == [], "told before the values were read: their owner may overwrite them"
        average(summands, *rest)
        assert other.listen() == [], "told before the values were used"

    monkeypatch.setattr(shared, "average", reading)
    other.plays(other.shows(values), other.has_read)
    pending.wait()
    assert out.tolist() == [3.0] * NUMEL
    assert other.heard.count(Kind.DONE) == 0 and other.listen() == [Kind.DONE]


def test_nothing_is_read_or_told_before_the_other_is_ready(pair):
    comm, other = pair
    _, out, pending = _begin(comm)
    other.listen()
    for _ in range(3):
        comm.progress()
    assert other.listen() == [] and not out.any()
    other.plays(other.shows(torch.full((2 * NUMEL,), 4.0)), other.has_read)
    pending.wait()
    assert out.tolist() == [3.0] * NUMEL


def test_a_collective_ends_when_the_other_has_read_and_not_before(pair):
    comm, other = pair
    _, out, pending = _begin(comm)
    told = []
    other.plays(
        other.shows(torch.full((2 * NUMEL,), 4.0)),
        lambda: told.append(out.tolist()),  # the rank has its values, and waits on
        other.has_read,
    )
    pending.wait()
    assert other.is_over, "the rank did not wait until its own values were read"
    assert told == [[3.0] * NUMEL]


def test_what_was_read_of_one_collective_does_not_count_for_the_next(pair):
    comm, other = pair
    values = torch.full((2 * NUMEL,), 4.0)
    for _ in range(2):
        full, out, pending = _begin(comm)
        other.plays(other.shows(values), other.has_read)
        pending.wait()
        assert other.is_over
    full, _, pending = _begin(comm)
    other.plays(other.shows(values), lambda: None, lambda: None, other.has_read)
    pending.wait()
    assert other.is_over and other.heard.count(Kind.DONE) + other.listen().count(Kind.DONE) == 3


def test_a_barrier_that_hears_another_collective_names_it_and_the_rank_at_once(pair):
    comm, other = pair
    _, _, pending = _begin(comm)  # so the rank knows the name
    other.plays(other.shows(torch.zeros(2 * NUMEL)), other.has_read)
    pending.wait()
    other.plays(other.is_ready("reduce", "u"))
    with pytest.raises(
        CommError, match="^a memory barrier: rank 1 is at reduce of unit 'u'; the ranks do not run the same"
    ):
        comm.shared_memory.barrier()


def test_a_collective_that_hears_a_barrier_names_the_rank_at_once(pair):
    comm, other = pair
    _, _, pending = _begin(comm)
    other.plays(other.comes_to_a_barrier(num_begun=0))
    with pytest.raises(
        CommError, match="^reduce of unit 'u': rank 1 is at a memory barrier; the ranks do not run the same"
    ):
        pending.wait()


def test_ranks_at_one_barrier_with_other_collectives_behind_them_are_told_at_once(pair):
    comm, other = pair
    other.plays(other.comes_to_a_barrier(num_begun=0))
    comm.shared_memory.barrier()
    other.plays(other.comes_to_a_barrier(num_begun=1))
    with pytest.raises(CommError, match="rank 1 is at this barrier after different collectives"):
        comm.shared_memory.barrier()


def test_a_rank_that_is_ahead_of_the_barrier_is_in_step(pair):
    """It has come to the barrier, and passes it when this rank comes; then it begins the next collective."""
    comm, other = pair
    _, _, pending = _begin(comm)
    other.plays(other.shows(torch.zeros(2 * NUMEL)), other.comes_to_a_barrier(num_begun=1), other.has_read)
    pending.wait()
    comm.shared_memory.barrier()
    _, _, pending = _begin(comm)
    other.plays(other.is_ready("reduce", "u"), other.has_read)
    pending.wait()
    assert other.is_over
