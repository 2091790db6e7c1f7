"""Connects the ranks of one host by pipes for short messages, and lets them map one another's memory.

[Note: messages] MEMORY announces memory of the sender. READY tells the peers that a rank's values for its next
collective are in place, and where. Each rank reads its peers' values once they are ready and then sends DONE, after
which the owner may overwrite them. All ranks start their collectives in the same order, so the n-th READY messages of
all ranks belong together; a tag identifies the collective, to detect ranks that are out of step. Who has received a
message sees what its sender had written to memory before, on any processor.

[Note: pipes] Memory is an anonymous file (`memfd_create`). A rank opens its peers' pipes and memory as
`/proc/<pid>/fd/<descriptor>`, which the kernel allows to the same user in the same PID and user namespace. Nothing has
a name in the file system, so nothing is left behind however a rank exits. Each pipe has one writer, so its exit is
noticed immediately.
"""

import os
import select
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from io import FileIO
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks


T = TypeVar("T")

NAME = "hf_zero"  # of memory, in /proc
# The pipes of this process. A forked process, such as a worker of a data loader, would keep them open after the exit
# of its rank, so that the peers would not notice it.
_OPEN: "weakref.WeakSet[FileIO]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: close(list(_OPEN)))


class Kind(IntEnum):
    """Kinds of messages. Each message consists of its kind and three numbers."""

    MEMORY = 0  # number of the memory, descriptor, size in bytes
    READY = 1  # tag, number of the memory, offset in bytes
    DONE = 2  # number of the collective, 0, 0


MAX_MILLISECONDS = 2**31 - 1  # of `poll`

_MESSAGE = struct.Struct("<IIQQ")  # less than PIPE_BUF, so the kernel writes either all of it or nothing


class Peer:
    """The connection to another rank, with what its messages have said."""

    def __init__(self, rank: int, pid: int, inbox: FileIO, outbox: FileIO):
        self.rank = rank
        self.memory = {0: torch.empty(0, dtype=torch.uint8)}  # by number; 0 is none
        self.ready: deque[tuple[int, int, int]] = deque()  # READY messages that have not been processed yet
        self.num_done = 0  # number of the last collective whose values it has read
        self._pid = pid
        self._inbox, self._outbox = self.pipes = inbox, outbox
        self._waiter = select.poll()
        self._waiter.register(inbox, select.POLLIN)

    def send(self, kind: Kind, *numbers: int) -> bool:
        """Sends a message. Returns False if the pipe is full."""
        try:
            return self._outbox.write(_MESSAGE.pack(kind, *numbers)) is not None
        except BrokenPipeError:
            return True  # the rank has ended: the next receive raises

    def receive(self, seconds: float) -> bool:
        """Receives a message. Returns False if none arrives in time."""
        if seconds and not self._waiter.poll(min(seconds * 1000, MAX_MILLISECONDS)):
            return False
        message = self._inbox.read(_MESSAGE.size)
        if message is None:
            return False
        if not message:
            raise ConnectionError("it has ended")
        kind, first, second, third = _MESSAGE.unpack(message)
        if kind == Kind.MEMORY:
            try:
                self.memory[first] = mapped(self._pid, second, third)
            except FileNotFoundError as error:
                raise ConnectionError("it has ended") from error
        elif kind == Kind.READY:
            self.ready.append((first, second, third))
        else:
            self.num_done = first
        return True


def connect_peers(group: dist.ProcessGroup) -> tuple[list[Peer] | None, str | None]:
    """Connects this rank with every other rank of a group whose addresses are known. Collective.

    Returns:
        The connections in rank order, and `None`; or `None` and the reason, if the ranks cannot share memory. The
        reason is `None` if they are on different hosts.
    """
    hosts, rank = ranks.hosts(group), dist.get_rank(group)
    if len(set(hosts)) > 1:
        boots, reason = _collected(group, ranks.boot_id)
        is_apart = reason is None and len(set(boots)) == 1 and len(set(hosts)) == len(hosts)
        return None, "the ranks run in separate network namespaces" if is_apart else None
    if ranks.this_host() is None:
        return None, None
    inboxes: dict[int, FileIO] = {}
    outboxes: dict[int, FileIO] = {}
    memory: list[FileIO] = []  # of one byte, to see whether the peers can map it

    def offer() -> tuple[int, int, dict[int, tuple[int, int]]]:
        memory.append(anonymous_file(1))
        for other in range(len(hosts)):
            if other != rank:
                inboxes[other] = _inbox()
        places = {other: (file.fileno(), os.fstat(file.fileno()).st_ino) for other, file in inboxes.items()}
        return os.getpid(), memory[0].fileno(), places

    def accept() -> None:
        for other in inboxes:
            pid, descriptor, places = offers[other]
            outboxes[other] = _outbox(pid, *places[rank])
            mapped(pid, descriptor, 1)

    offers, reason = _collected(group, offer)
    if reason is None:
        _, reason = _collected(group, accept)
    close(memory)
    pipes = [*inboxes.values(), *outboxes.values()]
    if reason is not None:
        close(pipes)
        return None, reason
    _OPEN.update(pipes)
    return [Peer(other, offers[other][0], inboxes[other], outboxes[other]) for other in inboxes], None


def _collected(group: dist.ProcessGroup, act: Callable[[], T]) -> tuple[list[T], str | None]:
    """Calls a function on all ranks. Returns its results, and the reason if it fails on any of them."""
    result, failure = None, None
    try:
        result = act()
    except OSError as error:  # for example, the ranks run in separate containers
        failure = f"{ranks.name_of(group, dist.get_rank(group))}: {error}"
    outcomes: list = [None] * dist.get_world_size(group)
    with ranks.transport_errors("connecting the ranks", group):
        dist.all_gather_object(outcomes, (result, failure), group=group)
    return [result for result, _ in outcomes], next((failure for _, failure in outcomes if failure), None)


def _inbox() -> FileIO:
    """Returns a pipe that other processes can open for writing."""
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(writes)
    return FileIO(reads)


def _outbox(pid: int, descriptor: int, inode: int) -> FileIO:
    """Opens the pipe of another process for writing."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if os.stat(path).st_ino != inode:
        raise OSError(f"process {pid} is a different one here: the ranks run in separate PID namespaces")
    return FileIO(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w")


def anonymous_file(nbytes: int) -> FileIO:
    """Returns an anonymous, zero-filled file in memory."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this Python was built without os.memfd_create")
    file = FileIO(os.memfd_create(NAME, os.MFD_CLOEXEC), "r+")
    file.truncate(nbytes)
    return file


def mapped(pid: int, descriptor: int, nbytes: int) -> Tensor:
    """Maps an anonymous file of a process as bytes. Python's `mmap` would keep a descriptor open for each mapping, and
    their number is limited."""
    with FileIO(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), "r+") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        # after an exception the process may have closed it, and another file may have its number
        if not os.readlink(path).startswith(f"/memfd:{NAME}") or os.fstat(file.fileno()).st_size != nbytes:
            raise ConnectionError("it has ended")
        try:
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's error for a failed system call
            raise OSError(str(error)) from error


def close(files: Iterable[FileIO]) -> None:
    for file in files:
        file.close()
