"""The other ranks of this host: short messages to them, and memory that is handed over with one.

Unix sockets carry the messages. Memory is an anonymous file (`memfd_create`) whose descriptor travels in a message.
Nothing has a name once the ranks have met, so nothing is left behind however a rank ends, and a rank that ends is
noticed at once.
"""

import errno
import os
import select
import socket
import struct
from collections import deque
from enum import IntEnum

import torch
from torch import Tensor


class Kind(IntEnum):
    """The kinds of messages; three numbers follow each."""

    READY = 0  # tag, number of the memory, offset in bytes
    DONE = 1
    BARRIER = 2  # 0, 0, number of collectives begun before it
    MEMORY = 3  # 0, number, size in bytes; carries a descriptor
    COMMON = 4  # likewise


_MESSAGE = struct.Struct("<IIQQ")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Peer:
    """The connection to another rank, with what has come from it and was not used yet."""

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
        """Sends one message; False when there is no room for it now.

        Raises:
            `OSError`: when it cannot be sent, and not because the other rank has ended.
        """
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
        """Takes in one message; False when none comes in time."""
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


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """The memory behind a descriptor, as bytes. The descriptor is closed, and no other is kept, as Python's `mmap`
    would do: the memory of a large model has more parts than a process may have open files by default."""
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's way to say that the system refuses
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)


def close(connections) -> None:
    for connection in connections:
        connection.close()
