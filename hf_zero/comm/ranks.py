"""Names the ranks of a process group, for errors about ranks that cannot be reached.

Backends report that a connection was closed, but rarely which one. This module converts their errors to ones that name
the rank, its host and its process.
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

import psutil
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hf_zero.comm.streams import free_and_total_nbytes
from hf_zero.errors import CommError, HfZeroError


# Signatures of the plain RuntimeErrors of gloo and torch's store. Most of gloo's errors name a file of its source.
SIGNED = (
    *("/gloo/", "pair closure", "Gloo connectFullMesh failed", "Pair is not connected", "Read error ["),
    "Connection was likely closed",
)
# Texts that say that the other end has closed the connection, from gloo, torch's store and the operating system.
CLOSED = (
    *("Connection closed by peer", "Socket closed", "Socket unexpectedly closed", "Remote peer closed the connection"),
    *("Pair is not connected", "Connection was likely closed"),
    *("Connection reset by peer", "Connection refused", "Broken pipe", "Software caused connection abort"),
    "Transport endpoint is not connected",
)
CLOSING_SECONDS = 2.0  # time in which an exiting process closes all of its connections, one after the other

# Tag of messages that are never received: they are only sent to test whether the connection is open.
PROBE_TAG = 0x3FFFFFFF
CPU = torch.device("cpu")
# torch 2.13 deprecates the `_tensor` name; 2.11 does not have the new one.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Process, host and device memory of a rank as they are exchanged. The host name is for messages; hosts are compared by
# the digest.
_ADDRESS = struct.Struct("<q256s16sq")
# The packed addresses of the ranks of each group, in rank order. Unpacked only when needed.
_ADDRESSES: WeakKeyDictionary[dist.ProcessGroup, bytes] = WeakKeyDictionary()
# The subgroups created from each group, by purpose, ranks and time limit.
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup]] = WeakKeyDictionary()


def exchange_addresses(group: dist.ProcessGroup, device: torch.device = CPU) -> None:
    """Exchanges host, process and the memory of `device` among the ranks of a group, through gloo if the group has it,
    else through the device. Collective."""
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
    """Registers that `group` has the same ranks as `other`, in the same order."""
    if other in _ADDRESSES:
        _ADDRESSES[group] = _ADDRESSES[other]


def make_group(members: list[int], **settings: Any) -> dist.ProcessGroup:
    """Creates a process group of global ranks without involving other ranks. `settings` are passed to
    `dist.new_group`.

    torch names such a group by its members and by the number of groups that each member has created. Members that have
    created different numbers of groups could therefore wait for each other forever. A group of all ranks involves
    every rank anyway and is named in the usual way.
    """
    return dist.new_group(members, use_local_synchronization=len(members) < dist.get_world_size(), **settings)


def communicator(
    group: dist.ProcessGroup, part: Sequence[int], device: torch.device, timeout_seconds: float, purpose: str
) -> dist.ProcessGroup:
    """Returns a process group of some or all ranks of another group, with the same backends. Groups are cached; the
    first call for each group is collective. On NCCL its kernels have a higher priority than computation."""
    known, key = _PARTS.setdefault(group, {}), (purpose, tuple(part), timeout_seconds)
    if key not in known:
        members, limit = dist.get_process_group_ranks(group), timedelta(seconds=timeout_seconds)
        options = None
        if device.type == "cuda" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = limit
        with transport_errors("connecting the ranks", group):
            backend = dist.get_backend_config(group)
            own = [members[rank] for rank in part]
            known[key] = make_group(own, timeout=limit, backend=backend, pg_options=options)
        if group in _ADDRESSES:
            every = _ADDRESSES[group]
            addresses = (every[rank * _ADDRESS.size : (rank + 1) * _ADDRESS.size] for rank in part)
            _ADDRESSES[known[key]] = b"".join(addresses)
    return known[key]


def name_of(group: dist.ProcessGroup, rank: int) -> str:
    """Returns a label of a rank for messages, such as "rank 3 (host, pid 41)", with its global rank."""
    name = f"rank {dist.get_global_rank(group, rank)}"
    if group in _ADDRESSES:
        pid, host, *_ = _ADDRESS.unpack_from(_ADDRESSES[group], rank * _ADDRESS.size)
        text = host.rstrip(b"\0").decode()
        name += f" ({text}, pid {pid})"
    return name


def hosts(group: dist.ProcessGroup) -> list[bytes]:
    """Returns a digest of the host of each rank. Requires `exchange_addresses`."""
    return [digest for _, _, digest, _ in _ADDRESS.iter_unpack(_ADDRESSES[group])]


def least_device_nbytes(group: dist.ProcessGroup) -> int:
    """Returns the memory of the smallest device in a group, which is the same on all ranks, or 0 if unknown. Requires
    `exchange_addresses`."""
    return min([nbytes for *_, nbytes in _ADDRESS.iter_unpack(_ADDRESSES[group])])


def boot_id() -> str:
    """Returns Linux's id of the current boot of this machine. Unlike host names (`localhost`) it is unique."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()


def this_host() -> str | None:
    """Returns a text that identifies the host of this rank, by boot and network namespace; `None` on systems other
    than Linux."""
    return boot_id() + os.readlink("/proc/self/ns/net") if sys.platform == "linux" else None


def route_to_master() -> str:
    """Describes, for messages, which address this host's name resolves to and which interface packets to `MASTER_ADDR`
    use."""
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "no address"
    route = f"this host's name {name} resolves to {found}"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        local = probe.getsockname()[0]
        route += f", and packets to MASTER_ADDR {master} leave from {local}"
        interfaces = psutil.net_if_addrs().items()
        route += "".join(f" ({name})" for name, own in interfaces if local in {each.address for each in own})
    return route


def is_gloo(group: dist.ProcessGroup, device: torch.device = CPU) -> bool:
    """Whether gloo serves the tensors of a device."""
    served = {each.type for each in group._device_types}
    return device.type in served and group._get_backend(device).name().lower() == "gloo"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the time limit, in seconds, of a group's collectives on tensors of a device."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # backends without options: MPI, torch's fake group, third-party backends
        timeout = default_pg_timeout
    return timeout.total_seconds()


def take_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the time limit of a group's gloo collectives, unless one was set when the group was created."""
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
            if _is_closed(error):  # not a connection that this rank has closed itself after a timeout
                closed.add(rank)
    return closed


def closed_ranks_soon(group: dist.ProcessGroup, error: BaseException | str) -> set[int]:
    """Like `closed_ranks`, but if `error` says that a rank has exited, retries until one is found or
    `CLOSING_SECONDS` have passed."""
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
    """Converts an error of the transport to one that names the ranks that cannot be reached.

    Args:
        what (`str`): what this rank was doing, the beginning of the message.
        group (`dist.ProcessGroup`): the ranks.
        error (`BaseException` or `str`): the error of the transport.
        peer (`int`, *optional*): the only rank of the group that was waited for.
        gone (`Collection[int]`): ranks that are known to have exited.
        seconds (`float`, *optional*): the time limit of the wait.
    """
    reason, limit = str(error).strip().partition("\n")[0], "" if seconds is None else f" within {seconds:.0f} s"
    has_waited = bool(re.search("time(d )?out", reason, re.IGNORECASE))
    if has_waited and peer is not None:  # other ranks that waited for it may have exited already
        return CommError(
            f"{what}: {name_of(group, peer)} does not answer{limit}; look at its log first; if it waits too, the "
            "ranks have run different forwards or backwards"
        )
    gone = closed_ranks_soon(group, error).union(gone, [peer] if peer is not None and _is_closed(error) else [])
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
    """Raises [`CommError`] that names the unreachable ranks of a group (by default the world) in place of transport
    errors of other code, such as Trainer's. Other errors pass through."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HfZeroError) or not is_of_transport(error) or not dist.is_initialized():
            raise
        group = group or dist.group.WORLD
        if not _is_signed(error) and not closed_ranks_soon(group, error):  # an unrelated connection
            raise
        raise failure(what, group, error) from error


def is_of_transport(error: Exception) -> bool:
    """Whether an error raised by a collective means that a rank could not be reached."""
    return _is_signed(error) or _is_closed(error)


def _is_signed(error: Exception) -> bool:
    """Whether an error certainly comes from torch.distributed. "Connection closed" alone may also come from a
    download."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in SIGNED)


def _is_closed(error: BaseException | str) -> bool:
    return isinstance(error, ConnectionError) or any(text in str(error) for text in CLOSED)
