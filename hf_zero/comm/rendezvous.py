"""Detects whether all ranks share a host and, if so, connects each pair by a Unix socket closed to other users.

Each rank listens under an abstract name, which is in no file system and vanishes with the rank.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch.distributed as dist

from hf_zero.comm import ranks
from hf_zero.comm.peers import close
from hf_zero.comm.ranks import name_of, transport_errors


# All ranks listen before any of them connects, so connecting takes no longer than this.
RENDEZVOUS_SECONDS = 10.0
GREETING_SECONDS = 1.0  # time limit for the greeting after a connection is accepted
_GREETING = struct.Struct("<I")  # the rank that connects
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True)
class _Address:
    """The host of a rank, and the name under which it listens there."""

    host: str | None = None  # None if memory cannot be shared
    boot: str | None = None
    name: str = ""
    fault: str | None = None  # why this rank does not listen; reported to all ranks instead of raised on this one


def rendezvous(group: dist.ProcessGroup) -> tuple[dict[int, socket.socket] | None, str | None]:
    """Connects this rank with every other rank by a Unix socket. Collective.

    Returns:
        The connections by rank, and `None`; or `None` and the reason, if the ranks cannot share memory. The reason is
        `None` if they are on different hosts.
    """
    listener, own = _listen()
    with listener or nullcontext():
        addresses = _all_gather(own, group)
        for owner, address in enumerate(addresses):
            if address.fault is not None:
                return None, f"{name_of(group, owner)}: {address.fault}"
        hosts = {address.host for address in addresses}
        if None in hosts or len(hosts) > 1:
            is_one_machine = None not in hosts and len({address.boot for address in addresses}) == 1
            is_apart = is_one_machine and len(hosts) == len(addresses)
            return None, "the ranks run in separate network namespaces" if is_apart else None
        assert listener is not None  # every rank has a host
        connections: dict[int, socket.socket] = {}
        rank = dist.get_rank(group)
        failure = _agreed(group, lambda: _connect(listener, addresses, rank, connections))
    if failure is None:
        return connections, None
    close(connections.values())
    return None, failure


def _listen() -> tuple[socket.socket | None, _Address]:
    try:
        host = ranks.this_host()
        if host is None:
            return None, _Address()
        listener, name = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), f"\0hf_zero_{secrets.token_hex(8)}"
        listener.bind(name)
        listener.listen(socket.SOMAXCONN)
        return listener, _Address(host, ranks.boot_id(), name)
    except OSError as error:
        return None, _Address(fault=str(error))


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


def _connect(
    listener: socket.socket, addresses: list[_Address], rank: int, connections: dict[int, socket.socket]
) -> None:
    """Connects to the lower ranks and accepts the connections of the higher ones, into `connections`."""
    end = time.monotonic() + RENDEZVOUS_SECONDS
    for lower in range(rank):
        connections[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections[lower].settimeout(RENDEZVOUS_SECONDS)
        connections[lower].connect(addresses[lower].name)
        if _user_of(connections[lower]) != os.geteuid():
            raise PermissionError(f"another user listens under the name of rank {lower}")
        connections[lower].send(_GREETING.pack(rank))
    while len(connections) < len(addresses) - 1:
        listener.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = listener.accept()
        guest = _greeted(connection)
        if guest is None or not rank < guest < len(addresses) or guest in connections:
            connection.close()  # another process; keep accepting
        else:
            connections[guest] = connection
    for connection in connections.values():
        connection.setblocking(False)


def _greeted(connection: socket.socket) -> int | None:
    """Returns the rank that has connected, or `None` if it is another process."""
    if _user_of(connection) != os.geteuid():
        return None
    connection.settimeout(GREETING_SECONDS)
    with suppress(OSError, struct.error):
        return _GREETING.unpack(connection.recv(_GREETING.size))[0]
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
