"""Connections to the other ranks of this host, for short messages and for handing over memory.

[Note: messages] A rank tells its peers where its values lie (READY), reads theirs when they are ready, and tells when
it has read them (DONE), after which the owner may write there again. All ranks begin their collectives in the same
order, so the n-th READY of each belongs together; a tag says which unit it is, to notice when they do not. BARRIER
says that a rank has come to a memory barrier, and how many collectives it had begun by then: as many as all others
had. MEMORY and COMMON introduce memory.

Unix sockets carry the messages. Memory is an anonymous file (`memfd_create`) whose descriptor travels in a message.
Nothing has a name once the ranks have met, so nothing is left behind however a rank ends, and a rank that ends is
noticed at once.
"""

import errno
import logging
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_zero.comm import ranks
from hf_zero.errors import CommError


logger = logging.getLogger(__name__)

# When a rank says whom it waits for, long before it gives up.
PATIENCE_SECONDS = 60.0


class Kind(IntEnum):
    """The kinds of messages. Each message is a kind and three numbers."""

    READY = 0  # tag, number of the memory, offset in bytes
    DONE = 1
    BARRIER = 2  # 0, 0, number of collectives begun before it
    MEMORY = 3  # 0, number, size in bytes; carries a descriptor
    COMMON = 4  # likewise


_MESSAGE = struct.Struct("<IIQQ")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Peer:
    """The connection to another rank, with the messages that have arrived and were not used yet."""

    def __init__(self, rank: int, connection: socket.socket):
        self.rank = rank
        self.socket = connection
        self.ready: deque[tuple[int, int, int]] = deque()
        self.common: deque[int] = deque()
        self.memory: dict[int, Tensor] = {}
        self.counts = {Kind.READY: 0, Kind.DONE: 0, Kind.BARRIER: 0}
        self.num_begun_at_barrier = 0  # the last that it has come to
        self._waiter = select.poll()
        self._waiter.register(connection, select.POLLIN)

    def send(self, kind: Kind, *numbers: int, descriptor: int | None = None) -> bool:
        """Sends one message. Returns False when the connection takes none now. Raises `OSError` when it cannot be
        sent, and not because the other rank has ended."""
        message = _MESSAGE.pack(kind, *(numbers or (0, 0, 0)))
        try:
            if descriptor is None:
                self.socket.send(message)
            else:
                socket.send_fds(self.socket, [message], [descriptor])
        except ConnectionError:
            pass  # who listens to it next hears that it has ended
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            raise
        return True

    def receive(self, seconds: float) -> bool:
        """Receives one message. Returns False when none comes in time."""
        if seconds and not self._waiter.poll(seconds * 1000):
            return False
        try:
            message, ancillary, _, _ = self.socket.recvmsg(_MESSAGE.size, _DESCRIPTOR_SPACE)
        except BlockingIOError:
            return False
        if not message:
            raise ConnectionError("it has ended")
        kind, tag, number, last = _MESSAGE.unpack(message)
        if kind in self.counts:
            self.counts[kind] += 1
        if kind == Kind.READY:
            self.ready.append((tag, number, last))
        elif kind == Kind.BARRIER:
            self.num_begun_at_barrier = last
        elif kind in (Kind.MEMORY, Kind.COMMON):
            if not ancillary:  # the kernel drops a descriptor that this process has no number for
                raise OSError(errno.EMFILE, "too many open files here, see ulimit -n")
            (descriptor,) = struct.unpack("i", ancillary[0][2])
            self.memory[number] = mapped(descriptor, last)
            if kind == Kind.COMMON:
                self.common.append(number)
        return True


class Peers:
    """The connections to all other ranks, which must begin the same collectives in the same order, see
    `hf_zero.comm.rendezvous`. Each message is waited for at most `timeout_seconds`."""

    def __init__(self, group: ProcessGroup, timeout_seconds: float, connections: dict[int, socket.socket]):
        self.all = [Peer(rank, connections[rank]) for rank in sorted(connections)]
        self.num_begun = 0  # collectives
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._num_barriers = 0
        self._num_begun_at_barrier = 0  # the last
        self._tags: dict[int, str] = {}  # what the tags mean that were used so far
        weakref.finalize(self, close, list(connections.values()))

    def begin(self, tag: int, what: str, number: int, offset: int) -> None:
        """Tells all other ranks that this rank is ready for its next collective. `tag`, `what`: of the unit and what
        is done with it; the latter in words; `number`, `offset`: where its values lie: of the memory, and in bytes."""
        self._tags[tag] = what
        self.send(Kind.READY, tag, number, offset)
        self.num_begun += 1

    def barrier(self, what: str) -> None:
        """Waits until all ranks have come to this barrier; `what` names it in an error."""
        self._num_barriers += 1
        self._num_begun_at_barrier = self.num_begun
        self.send(Kind.BARRIER, 0, 0, self.num_begun)
        for peer in self.all:
            self.receive_until(peer, lambda peer: peer.counts[Kind.BARRIER] >= self._num_barriers, what)

    def send(self, kind: Kind, *numbers: int, descriptor: int | None = None) -> None:
        """Sends one message to each other rank."""
        for peer in self.all:
            while not self._try_to_send(peer, kind, *numbers, descriptor=descriptor):
                for other in self.all:  # it may be waiting for room as well: make some
                    self.receive(other, 0.001, "sending")

    def receive_until(self, peer: Peer, is_there: Callable[[Peer], object], what: str) -> None:
        """Receives messages of one rank until the expected one is there. Raises [`CommError`] when it does not come,
        or the ranks are out of step."""
        self._refuse_out_of_step(peer, what)
        while not is_there(peer):
            if not self._receive_patiently(peer, what):
                raise self._failed(what, peer, "timed out")
            self._refuse_out_of_step(peer, what)

    def _receive_patiently(self, peer: Peer, what: str) -> bool:
        first = min(PATIENCE_SECONDS, self._timeout_seconds)
        if self.receive(peer, first, what):
            return True
        if first < self._timeout_seconds:
            logger.warning(
                "hf_zero: %s: has waited %g s for %s, and waits %g s at most; unless that rank is at work by itself, "
                "it has made a call alone that all ranks make together, such as saving or generating, or left one out",
                *(what, first, ranks.name_of(self._group, peer.rank), self._timeout_seconds),
            )
        return self.receive(peer, self._timeout_seconds - first, what)

    def receive(self, peer: Peer, seconds: float, what: str) -> bool:
        """Receives one message as `Peer.receive` does; `what` names the work in an error."""
        try:
            return peer.receive(seconds)
        except OSError as error:
            raise self._failed(what, peer, error) from error

    def out_of_step(self, what: str, peer: Peer, there: str | int) -> CommError:
        """Returns the error for ranks that do different things at the same time: this one `what`, the other one what
        is done `there`, or has that tag."""
        if isinstance(there, int):
            there = self._tags.get(there, "another unit or step")
        return CommError(
            f"{what}: {ranks.name_of(self._group, peer.rank)} has come to {there}; the ranks do not run the same "
            "program; look at its log first"
        )

    def _try_to_send(self, peer: Peer, kind: Kind, *numbers: int, descriptor: int | None) -> bool:
        try:
            return peer.send(kind, *numbers, descriptor=descriptor)
        except OSError as error:
            raise self._failed("sending", peer, error) from error

    def _refuse_out_of_step(self, peer: Peer, what: str) -> None:
        """Refuses a rank that has begun another number of collectives since the last barrier than this one."""
        num_barriers = peer.counts[Kind.BARRIER]
        if num_barriers < self._num_barriers:  # this rank waits for it at a memory barrier
            if peer.counts[Kind.READY] > self.num_begun:
                raise self.out_of_step(what, peer, peer.ready[-1][0])
        elif num_barriers > self._num_barriers:  # it waits for this rank
            if self.num_begun > peer.num_begun_at_barrier:
                raise self.out_of_step(what, peer, "a memory barrier")
        elif self._num_begun_at_barrier != peer.num_begun_at_barrier:
            raise self.out_of_step(what, peer, "this barrier with other collectives behind it")

    def _failed(self, what: str, peer: Peer, error: BaseException | str) -> CommError:
        return ranks.failure(what, self._group, error, peer=peer.rank, seconds=self._timeout_seconds)


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Maps the memory of a descriptor as bytes, and closes the descriptor. Python's `mmap` would keep one open for
    each mapping, and a process may have few."""
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's way to say that the system refuses
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def close(connections) -> None:
    for connection in connections:
        connection.close()
