"""Names of the ranks of a process group, for errors that say which of them is no longer reached.

Backends say that a connection was closed, and seldom whose. Here an error of theirs becomes one that names the rank,
its host and its process.
"""

import hashlib
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hf_zero.comm.streams import free_and_total_nbytes
from hf_zero.errors import CommError, HfZeroError


if sys.platform == "linux":
    import fcntl

# How plain RuntimeErrors of gloo and of torch's store are known: most of gloo's name the place in its sources.
SIGNED = (
    *("/gloo/", "pair closure", "Gloo connectFullMesh failed", "Pair is not connected", "Read error ["),
    "Connection was likely closed",
)
# How an error says that the other end has gone: in gloo's words, those of torch's store, and the system's.
CLOSED = (
    *("Connection closed by peer", "Socket closed", "Socket unexpectedly closed", "Remote peer closed the connection"),
    *("Pair is not connected", "Connection was likely closed"),
    *("Connection reset by peer", "Connection refused", "Broken pipe", "Software caused connection abort"),
    "Transport endpoint is not connected",
)
CLOSING_SECONDS = 2.0  # in which a process that is ending has closed all of its connections, one after the other

_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface

# Of no message that is meant to arrive: sending one only asks whether the connection is open.
PROBE_TAG = 0x3FFFFFFF
CPU = torch.device("cpu")
# torch 2.13 deprecates the `_tensor` name; 2.11 does not have the new one.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Process and host of a rank, as they are exchanged: the host's name is for messages, what tells hosts apart a digest.
# The last field is the memory of the rank's device.
_ADDRESS = struct.Struct("<q256s16sq")
# Of each group: the addresses of its ranks, in rank order. They are read when a message names one.
_ADDRESSES: WeakKeyDictionary[dist.ProcessGroup, bytes] = WeakKeyDictionary()
# Of each group: those that were made of its ranks, by purpose, ranks and time limit.
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup]] = WeakKeyDictionary()


def exchange_addresses(group: dist.ProcessGroup, device: torch.device = CPU) -> None:
    """Exchanges host, process and the memory of `device` among the ranks of a group, on the device unless gloo does
    it. All of them call it."""
    if group not in _ADDRESSES:
        name = socket.gethostname()
        digest = hashlib.blake2b((this_host() or name).encode(), digest_size=16).digest()
        _, device_nbytes = (None if device.type == "cpu" else free_and_total_nbytes(device)) or (0, 0)
        own = bytearray(_ADDRESS.pack(os.getpid(), name.encode(), digest, device_nbytes))
        row = torch.frombuffer(own, dtype=torch.uint8).to(CPU if is_gloo(group) else device)
        rows = row.new_empty(dist.get_world_size(group) * row.numel())
        with transport_errors("introducing the ranks", group):
            gather_single(rows, row, group=group)
        _ADDRESSES[group] = rows.cpu().numpy().tobytes()


def same_ranks(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Registers `group` as one of the same ranks as `other`, in the same order."""
    if other in _ADDRESSES:
        _ADDRESSES[group] = _ADDRESSES[other]


def make_group(members: list[int], **settings: Any) -> dist.ProcessGroup:
    """Makes a process group of global ranks, in which ranks that are no members have no part. The settings are those
    of `dist.new_group`.

    torch names such a group by its members and how many groups each has made, so members that have made unlike many
    could wait for each other for ever. A group of all ranks is named as others are, since it leaves none out.
    """
    return dist.new_group(members, use_local_synchronization=len(members) < dist.get_world_size(), **settings)


def part_of(
    group: dist.ProcessGroup, part: Sequence[int], timeout_seconds: float, purpose: str, **settings: Any
) -> dist.ProcessGroup:
    """Returns a process group of some ranks of another one, or of all, with the backends of that one. Who asks for
    the same again gets the same one; the first call is collective. The settings are those of `make_group`."""
    known, key = _PARTS.setdefault(group, {}), (purpose, tuple(part), timeout_seconds)
    if key not in known:
        members, limit = dist.get_process_group_ranks(group), timedelta(seconds=timeout_seconds)
        with transport_errors("connecting the ranks", group):
            backend = dist.get_backend_config(group)
            known[key] = make_group([members[rank] for rank in part], timeout=limit, backend=backend, **settings)
        if len(part) == len(members):
            same_ranks(known[key], group)
    return known[key]


def name_of(group: dist.ProcessGroup, rank: int) -> str:
    """Returns the name of a rank for messages, with its number in the world, as in its log."""
    name = f"rank {dist.get_global_rank(group, rank)}"
    if group in _ADDRESSES:
        pid, host, *_ = _ADDRESS.unpack_from(_ADDRESSES[group], rank * _ADDRESS.size)
        text = host.rstrip(b"\0").decode()
        name += f" ({text}, pid {pid})"
    return name


def hosts(group: dist.ProcessGroup) -> list[bytes]:
    """Returns what tells the host of each rank of a group from others. They must have exchanged their addresses."""
    return [digest for _, _, digest, _ in _ADDRESS.iter_unpack(_ADDRESSES[group])]


def least_device_nbytes(group: dist.ProcessGroup) -> int:
    """Returns the memory of the smallest device of a group, the same on all ranks; 0 if one is not known. They must
    have exchanged their addresses."""
    return min([nbytes for *_, nbytes in _ADDRESS.iter_unpack(_ADDRESSES[group])])


def boot_id() -> str:
    """Returns what Linux has called this machine since it was started. Names may be shared, as `localhost` is."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()


def this_host() -> str | None:
    """Returns a text that is equal for ranks that can reach each other's sockets; `None` on other systems than
    Linux."""
    return boot_id() + os.readlink("/proc/self/ns/net") if sys.platform == "linux" else None


def route_to_master() -> str:
    """Returns, for a message, the address by which this host's name is found, and the interface by which packets to
    `MASTER_ADDR` leave."""
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "no address"
    told = f"this host's name {name} stands for {found}"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # nothing is sent
        local = probe.getsockname()[0]
        told += f", and packets to MASTER_ADDR {master} leave from {local}"
        told += f" ({interface})" if (interface := _interface_of(local)) else ""
    return told


def _interface_of(address: str) -> str | None:
    """Returns the interface that has an IPv4 address."""
    if sys.platform != "linux":
        return None
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                asked = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24] == wanted:
                    return name
    return None


def is_gloo(group: dist.ProcessGroup, device: torch.device = CPU) -> bool:
    """Whether gloo serves the tensors of a device, by default of the CPU."""
    served = {each.type for each in group._device_types}
    return device.type in served and group._get_backend(device).name().lower() == "gloo"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the time limit of a group's collectives on a device's tensors, in seconds."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # not every backend has options: MPI, torch's fake group, those of others
        timeout = default_pg_timeout
    return timeout.total_seconds()


def take_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the time limit of a group's gloo collectives, unless the maker of the group has chosen one."""
    backend = group._get_backend(CPU) if is_gloo(group) else None
    if backend is not None and backend.options._timeout == default_pg_timeout:
        backend._set_default_timeout(timedelta(seconds=seconds))


def closed_ranks(group: dist.ProcessGroup) -> set[int]:
    """Returns the ranks whose gloo connections are closed."""
    closed = set()
    for rank in range(dist.get_world_size(group)) if is_gloo(group) else ():
        try:
            if rank != dist.get_rank(group):
                dist.isend(torch.zeros(1), dist.get_global_rank(group, rank), group=group, tag=PROBE_TAG)
        except RuntimeError as error:
            if _is_closed(error):  # and not given up by this rank, which had waited long enough
                closed.add(rank)
    return closed


def _closed_ranks_soon(group: dist.ProcessGroup, error: BaseException | str) -> set[int]:
    """Returns what `closed_ranks` does, after more tries where an error says that a rank has gone and none is
    found."""
    deadline = time.monotonic() + (CLOSING_SECONDS if _is_closed(error) and is_gloo(group) else 0.0)
    while not (found := closed_ranks(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def failure(
    what: str,
    group: dist.ProcessGroup,
    error: BaseException | str,
    *,
    peer: int | None = None,
    gone: Collection[int] = (),
    seconds: float | None = None,
) -> CommError:
    """Returns the error for ranks that cannot be reached, by what the transport says. A single rank of the group was
    waited for (`peer`), at most so many `seconds`; `gone` are ranks that are known to have ended."""
    reason, limit = str(error).strip().partition("\n")[0], "" if seconds is None else f" within {seconds:.0f} s"
    has_waited = bool(re.search("time(d )?out", reason, re.IGNORECASE))
    if has_waited and peer is not None:  # others that have waited for it may have ended before
        return CommError(
            f"{what}: {name_of(group, peer)} does not answer{limit}; look at its log first; if it waits too, the "
            "ranks have run different forwards or backwards"
        )
    gone = _closed_ranks_soon(group, error).union(gone, [peer] if peer is not None and _is_closed(error) else [])
    names = " and ".join(name_of(group, rank) for rank in sorted(gone))
    if len(gone) == 1:
        return CommError(f"{what}: {names} has ended; look at its log first")
    if gone:
        return CommError(f"{what}: {names} have ended; look at their logs first")
    if has_waited:
        return CommError(f"{what}: a rank does not answer{limit}; look at the logs of all ranks")
    who = "a rank" if peer is None else name_of(group, peer)
    return CommError(f"{what}: {who} cannot be reached: {reason}; look at the logs of all ranks")


@contextmanager
def transport_errors(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Names the ranks that cannot be reached when other code than ours communicates, such as Trainer's, by default
    those of the world. Raises [`CommError`] instead of an error of the transport. All other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HfZeroError) or not is_of_transport(error) or not dist.is_initialized():
            raise
        group = group or dist.group.WORLD
        if not _is_signed(error) and not _closed_ranks_soon(group, error):  # of a connection to somewhere else
            raise
        raise failure(what, group, error) from error


def is_of_transport(error: Exception) -> bool:
    """Whether an error that comes from a collective says that a rank was not reached."""
    return _is_signed(error) or _is_closed(error)


def _is_signed(error: Exception) -> bool:
    """Whether an error certainly comes from torch.distributed. An error of a download, too, may say that a connection
    was closed."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in SIGNED)


def _is_closed(error: BaseException | str) -> bool:
    return isinstance(error, ConnectionError) or any(text in str(error) for text in CLOSED)
