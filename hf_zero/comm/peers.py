"""Connections to the other ranks of this host, for short messages and for sharing memory.

[Note: messages] READY tells the peers that a rank's values for its next collective are in place, and where. Each rank
reads its peers' values once they are ready and then sends DONE, after which the owner may overwrite them. All ranks
start their collectives in the same order, so the n-th READY messages of all ranks belong together; a tag identifies
the unit, to detect ranks that are out of step. BARRIER says that a rank has reached a memory barrier, and how many
collectives it has started so far, which must be the same on all ranks. MEMORY and COMMON announce new memory.

Messages go through Unix sockets. Memory is an anonymous file (`memfd_create`) whose descriptor is sent in a message.
Once the ranks are connected nothing has a name in the file system, so nothing is left behind however a rank exits, and
the exit of a rank is noticed immediately.
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

# After this time, a waiting rank logs whom it is waiting for, long before the timeout.
PATIENCE_SECONDS = 60.0


# The connections of this process. A forked process, such as a worker of a data loader, would keep them open after the
# exit of its rank, so that the peers would not notice it.
_OPEN: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: close(list(_OPEN)))


class Kind(IntEnum):
    """Kinds of messages. Each message consists of its kind and three numbers."""

    READY = 0  # tag, number of the memory, offset in bytes
    DONE = 1
    BARRIER = 2  # 0, 0, number of collectives started before it
    MEMORY = 3  # 0, number, size in bytes; carries a descriptor
    COMMON = 4  # like MEMORY


_MESSAGE = struct.Struct("<IIQQ")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Peer:
    """The connection to another rank, with messages that have been received but not processed."""

    def __init__(self, rank: int, connection: socket.socket):
        self.rank = rank
        self.socket = connection
        self.ready: deque[tuple[int, int, int]] = deque()
        self.common: deque[int] = deque()
        self.memory: dict[int, Tensor] = {}
        self.counts = {Kind.READY: 0, Kind.DONE: 0, Kind.BARRIER: 0}
        self.num_begun_at_barrier = 0  # as of the last barrier message
        self._waiter = select.poll()
        self._waiter.register(connection, select.POLLIN)

    def send(self, kind: Kind, *numbers: int, descriptor: int | None = None) -> bool:
        """Sends a message. Returns False if the connection is full. Raises `OSError` if sending fails for another
        reason than the exit of the other rank."""
        message = _MESSAGE.pack(kind, *(numbers or (0, 0, 0)))
        try:
            if descriptor is None:
                self.socket.send(message)
            else:
                socket.send_fds(self.socket, [message], [descriptor])
        except ConnectionError:
            pass  # the next receive raises
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            raise
        return True

    def receive(self, seconds: float) -> bool:
        """Receives a message. Returns False if none arrives in time."""
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
            if not ancillary:  # the kernel drops the descriptor if this process has too many open files
                raise OSError(errno.EMFILE, "too many open files; raise the limit (ulimit -n)")
            (descriptor,) = struct.unpack("i", ancillary[0][2])
            self.memory[number] = mapped(descriptor, last)
            if kind == Kind.COMMON:
                self.common.append(number)
        return True


class Peers:
    """The connections to all other ranks, which must start the same collectives in the same order (see
    `hf_zero.comm.rendezvous`). `timeout_seconds` limits the wait for each message."""

    def __init__(self, group: ProcessGroup, timeout_seconds: float, connections: dict[int, socket.socket]):
        self.all = [Peer(rank, connections[rank]) for rank in sorted(connections)]
        self.num_begun = 0  # collectives
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._num_barriers = 0
        self._num_begun_at_barrier = 0  # as of the last barrier
        self._tags: dict[int, str] = {}  # descriptions of the tags used so far
        _OPEN.update(connections.values())
        weakref.finalize(self, close, list(connections.values()))

    def begin(self, tag: int, what: str, number: int, offset: int) -> None:
        """Tells all other ranks that this rank is ready for its next collective.

        Args:
            tag (`int`): identifies the collective and the unit.
            what (`str`): the same in words, for messages.
            number (`int`): number of the memory that contains this rank's values.
            offset (`int`): their offset in it, in bytes.
        """
        self._tags[tag] = what
        self.send(Kind.READY, tag, number, offset)
        self.num_begun += 1

    def barrier(self, what: str) -> None:
        """Waits until all ranks have reached this barrier. `what` names it in error messages."""
        self._num_barriers += 1
        self._num_begun_at_barrier = self.num_begun
        self.send(Kind.BARRIER, 0, 0, self.num_begun)
        for peer in self.all:
            self.receive_until(peer, lambda peer: peer.counts[Kind.BARRIER] >= self._num_barriers, what)

    def send(self, kind: Kind, *numbers: int, descriptor: int | None = None) -> None:
        """Sends a message to every other rank."""
        for peer in self.all:
            while not self._try_to_send(peer, kind, *numbers, descriptor=descriptor):
                for other in self.all:  # it may be blocked in sending as well: receive to make room
                    self.receive(other, 0.001, "sending")

    def receive_until(self, peer: Peer, is_there: Callable[[Peer], object], what: str) -> None:
        """Receives messages from a rank until the expected one has arrived. Raises [`CommError`] on timeout or if the
        ranks are out of step."""
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
                "hf_zero: %s: has waited %g s for %s, and will wait for up to %g s; either that rank is busy, or the "
                "ranks do not all call the same collective functions, such as saving or generating",
                *(what, first, ranks.name_of(self._group, peer.rank), self._timeout_seconds),
            )
        return self.receive(peer, self._timeout_seconds - first, what)

    def receive(self, peer: Peer, seconds: float, what: str) -> bool:
        """Receives a message like `Peer.receive`; `what` names the work in error messages."""
        try:
            return peer.receive(seconds)
        except OSError as error:
            raise self._failed(what, peer, error) from error

    def out_of_step(self, what: str, peer: Peer, there: str | int) -> CommError:
        """Returns the error for ranks that are out of step: this one does `what`, `peer` does `there`, which is a
        description or a tag."""
        if isinstance(there, int):
            there = self._tags.get(there, "another unit or step")
        return CommError(
            f"{what}: {ranks.name_of(self._group, peer.rank)} is at {there}; the ranks do not run the same "
            "program; look at its log first"
        )

    def _try_to_send(self, peer: Peer, kind: Kind, *numbers: int, descriptor: int | None) -> bool:
        try:
            return peer.send(kind, *numbers, descriptor=descriptor)
        except OSError as error:
            raise self._failed("sending", peer, error) from error

    def _refuse_out_of_step(self, peer: Peer, what: str) -> None:
        """Raises if a peer has started a different number of collectives since the last barrier."""
        num_barriers = peer.counts[Kind.BARRIER]
        if num_barriers < self._num_barriers:  # this rank is waiting for it at a barrier
            if peer.counts[Kind.READY] > self.num_begun:
                raise self.out_of_step(what, peer, peer.ready[-1][0])
        elif num_barriers > self._num_barriers:  # it is waiting for this rank at a barrier
            if self.num_begun > peer.num_begun_at_barrier:
                raise self.out_of_step(what, peer, "a memory barrier")
        elif self._num_begun_at_barrier != peer.num_begun_at_barrier:
            raise self.out_of_step(what, peer, "this barrier after different collectives")

    def _failed(self, what: str, peer: Peer, error: BaseException | str) -> CommError:
        return ranks.failure(what, self._group, error, peer=peer.rank, seconds=self._timeout_seconds)


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Maps the memory of a descriptor as bytes and closes the descriptor. Python's `mmap` would keep a descriptor open
    for each mapping, and their number is limited."""
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's error for a failed system call
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def close(connections) -> None:
    for connection in connections:
        connection.close()
