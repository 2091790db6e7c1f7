"""Detects whether all ranks share a host and, if so, connects each pair by a Unix socket closed to other users.

Each rank listens in a folder that only its user can enter. The ranks exchange the names of their folders before they
create them, and every rank removes all folders after connecting, so those of killed ranks are removed as well.
"""

import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from hf_zero.comm import ranks
from hf_zero.comm.peers import close
from hf_zero.comm.ranks import name_of, transport_errors


# All ranks listen before any of them connects, so connecting takes no longer than this.
RENDEZVOUS_SECONDS = 10.0
GREETING_SECONDS = 1.0  # time limit for the greeting after a connection is accepted
_GREETING = struct.Struct("<I16s")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True)
class _Endpoint:
    """The address of a rank: its host, the folder of its socket, and a password."""

    host: str | None  # None if memory cannot be shared
    boot: str | None
    folder: str
    password: bytes
    fault: str | None = None  # why this rank has no address

    @classmethod
    def own(cls) -> "_Endpoint":
        try:
            host = ranks.this_host()
            folder = os.path.join(tempfile.gettempdir(), f"hf_zero_{secrets.token_hex(8)}")
            return cls(host, host and ranks.boot_id(), folder, secrets.token_bytes(16))
        except OSError as error:  # reported to all ranks instead of raised on this one
            return cls(None, None, "", b"", str(error))


def rendezvous(group: dist.ProcessGroup) -> tuple[dict[int, socket.socket] | None, str | None]:
    """Connects this rank with every other rank by a Unix socket. Collective.

    Returns:
        The connections by rank, and `None`; or `None` and the reason, if the ranks cannot share memory. The reason is
        `None` if they are on different hosts.
    """
    endpoints, rank = _all_gather(_Endpoint.own(), group), dist.get_rank(group)
    for owner, endpoint in enumerate(endpoints):
        if endpoint.fault is not None:
            return None, f"{name_of(group, owner)}: {endpoint.fault}"
    hosts = {endpoint.host for endpoint in endpoints}
    if None in hosts or len(hosts) > 1:
        is_one_machine = None not in hosts and len({endpoint.boot for endpoint in endpoints}) == 1
        is_apart = is_one_machine and len(hosts) == len(endpoints)
        return None, "the ranks run in separate network namespaces" if is_apart else None
    connections: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        failure = _agreed(group, lambda: _listen(listener, endpoints[rank].folder))
        failure = failure or _agreed(group, lambda: connections.update(_connected(listener, endpoints, rank)))
    finally:
        listener.close()
        for endpoint in endpoints:
            shutil.rmtree(endpoint.folder, ignore_errors=True)
    if failure is None:
        return connections, None
    close(connections.values())
    return None, failure


def _agreed(group: dist.ProcessGroup, act: Callable[[], None]) -> str | None:
    """Runs `act` on all ranks and returns the reason if it fails on any of them."""
    failure = None
    try:
        act()
    except OSError as error:  # for example, the ranks run in separate containers
        # timeouts sort last: the other errors are the cause
        failure = isinstance(error, TimeoutError), f"{name_of(group, dist.get_rank(group))}: {error}"
    failures = [each for each in _all_gather(failure, group) if each is not None]
    return min(failures)[1] if failures else None


def _listen(listener: socket.socket, folder: str) -> None:
    os.mkdir(folder, 0o700)
    with _in(folder) as path:
        listener.bind(path)
    listener.listen(socket.SOMAXCONN)


def _connected(listener: socket.socket, endpoints: list[_Endpoint], rank: int) -> dict[int, socket.socket]:
    connections, end = {}, time.monotonic() + RENDEZVOUS_SECONDS
    for lower in range(rank):
        connections[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections[lower].settimeout(RENDEZVOUS_SECONDS)
        with _in(endpoints[lower].folder) as path:
            connections[lower].connect(path)
        if _user_of(connections[lower]) != os.geteuid():
            raise PermissionError(f"another user listens in {endpoints[lower].folder}")
        connections[lower].send(_GREETING.pack(rank, endpoints[lower].password))
    while len(connections) < len(endpoints) - 1:
        listener.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = listener.accept()
        guest = _greeted(connection, endpoints[rank].password)
        if guest is None:
            connection.close()  # another process; keep accepting
        else:
            connections[guest] = connection
    for connection in connections.values():
        connection.setblocking(False)
    return connections


@contextmanager
def _in(folder: str) -> Iterator[str]:
    """Yields the path of the socket in an opened folder. Socket paths are limited to 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/rank"
    finally:
        os.close(descriptor)


def _greeted(connection: socket.socket, password: bytes) -> int | None:
    """Returns the rank that has connected, or `None` if it is another process."""
    if _user_of(connection) != os.geteuid():
        return None
    connection.settimeout(GREETING_SECONDS)
    with suppress(OSError, struct.error):
        guest, password_sent = _GREETING.unpack(connection.recv(_GREETING.size))
        if secrets.compare_digest(password_sent, password):
            return guest
    return None


def _user_of(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end, as reported by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


def _all_gather(obj, group: dist.ProcessGroup) -> list:
    box: list = [None] * dist.get_world_size(group)
    with transport_errors("connecting the ranks", group):
        dist.all_gather_object(box, obj, group=group)
    return box
