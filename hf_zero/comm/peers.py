"""The other ranks of this host: short messages to them, and memory that is handed over with one.

Unix sockets carry the messages. Memory is an anonymous file (`memfd_create`) whose descriptor travels in a message.
Nothing has a name, so nothing is left behind however a rank ends, and a rank that ends is noticed at once.
"""

import os
import select
import socket
import struct
import sys
from collections import deque
from enum import IntEnum
from mmap import mmap

import torch
import torch.distributed as dist
from torch import Tensor


class Kind(IntEnum):
    """What a message says; its three numbers follow."""

    READY = 0  # tag, number of the memory, offset in bytes
    DONE = 1
    FENCE = 2
    MEMORY = 3  # 0, number, size in bytes; carries a descriptor
    COMMON = 4  # likewise


_MESSAGE = struct.Struct("<IIQQ")
# All ranks listen before any connects: one that does not come at once does not come at all.
MEETING_SECONDS = 10.0
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0


class Peer:
    """What has come from another rank and was not used yet."""

    def __init__(self, rank: int, connection: socket.socket):
        self.rank = rank
        self.socket = connection
        self.ready: deque[tuple[int, int, int]] = deque()
        self.common: deque[int] = deque()
        self.memory: dict[int, Tensor] = {}
        self.counts = {Kind.DONE: 0, Kind.FENCE: 0}
        self._waiter = select.poll()
        self._waiter.register(connection, select.POLLIN)

    def tell(self, kind: Kind, *numbers: int, descriptor: int | None = None) -> bool:
        """Sends one message; False when its queue is full."""
        message = _MESSAGE.pack(kind, *(numbers or (0, 0, 0)))
        try:
            if descriptor is None:
                self.socket.send(message)
            else:
                socket.send_fds(self.socket, [message], [descriptor])
        except BlockingIOError:
            return False
        except OSError:
            pass  # who listens to it next hears that it has ended
        return True

    def hear(self, seconds: float) -> bool:
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
        if kind == Kind.READY:
            self.ready.append((tag, number, last))
        elif kind in self.counts:
            self.counts[kind] += 1
        else:
            self.memory[number] = mapped(*struct.unpack("i", ancillary[0][2]), last)
            if kind == Kind.COMMON:
                self.common.append(number)
        return True


def meet(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Connects this rank with every other one by a Unix socket; with none where they are not all on one host.

    Args:
        group (`dist.ProcessGroup`): the ranks; all of them call.

    Returns:
        `dict[int, socket.socket]` or `None`: by rank.
    """
    host, connections = host_name(), {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if host else None
    if listener:
        listener.bind("")  # the kernel gives it a name of its own, in no file system
        listener.listen(dist.get_world_size(group))
    homes = _all_gather((host, listener and listener.getsockname()), group)
    if host and all(home == host for home, _ in homes):
        try:
            connections = _connected(listener, [name for _, name in homes], dist.get_rank(group))
        except OSError:  # in a container of its own, or another user's
            pass
    if listener:
        listener.close()
    if all(_all_gather(bool(connections), group)):
        return connections
    close(connections.values())
    return None


def _connected(listener: socket.socket, names: list[bytes], rank: int) -> dict[int, socket.socket]:
    connections = {}
    for lower in range(rank):
        connections[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections[lower].settimeout(MEETING_SECONDS)
        connections[lower].connect(names[lower])
        connections[lower].send(struct.pack("<I", rank))
    listener.settimeout(MEETING_SECONDS)
    while len(connections) < len(names) - 1:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()  # not one of ours
            continue
        connection.settimeout(MEETING_SECONDS)
        connections[struct.unpack("<I", connection.recv(4))[0]] = connection
    for connection in connections.values():
        connection.setblocking(False)
    return connections


def host_name() -> str | None:
    """What ranks that can reach one another's sockets have in common; `None` where memory cannot be handed over."""
    if sys.platform != "linux":
        return None
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read() + os.readlink("/proc/self/ns/net")


def _all_gather(obj, group: dist.ProcessGroup) -> list:
    box: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, obj, group=group)
    return box


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """The memory behind a descriptor, as bytes; the descriptor is closed."""
    memory = torch.frombuffer(mmap(descriptor, nbytes), dtype=torch.uint8)
    os.close(descriptor)
    return memory


def close(connections) -> None:
    for connection in connections:
        connection.close()
