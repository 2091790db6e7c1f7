"""Chooses the collectives of this process: none, pairwise exchange, shared memory, or the backend's own."""

import atexit
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hf_zero.comm import ranks
from hf_zero.comm.base import MESSAGES_NBYTES, SHARED_NBYTES, Comm, native_bucket_nbytes
from hf_zero.comm.distributed import NativeComm, refuse_unordered
from hf_zero.comm.groups import Average, groups_of, refuse_uneven, shard_size_of
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.peers import connect_peers
from hf_zero.comm.shared import SharedComm
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError


logger = logging.getLogger(__name__)


def connect(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float | None = None,
    bucket_nbytes: int | str,
    shared_memory: bool = True,
    shard_size: int | str | None = None,
    fits: Callable[[int], bool] = lambda _: True,
) -> Comm:
    """Connects the data-parallel ranks. A process that was not started by a launcher is a world of one rank.

    Arguments that are not described here are settings of `ZeroConfig`.

    Args:
        group (`dist.ProcessGroup`, *optional*): the data-parallel ranks; the whole world if `None`.
        timeout_seconds (`float`, *optional*): time limit of one exchange; defaults to the limit of the group. A limit
            that was set when the group was created still applies to exchanges that only use the backend.
        fits (`Callable`): for `shard_size="auto"`, whether a device can hold its shard if the given number of ranks
            divide the model.

    Raises:
        `ConfigError`: if the launcher's `WORLD_SIZE` differs from the size of the process group, this rank is not a
            member of the group, no backend of the group supports the device, the ranks do not form equal shard groups,
            or NCCL would not launch the kernels of two communicators in the same order on all ranks.
        `CommError`: if the hosts of the ranks cannot reach each other.
    """
    Streams(device).set_device()  # for backends and libraries that use the current device
    if not _join(device, timeout_seconds, is_world=group is None):
        refuse_uneven(shard_size, 1)
        return Comm(device, timeout_seconds or default_pg_timeout.total_seconds())
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ConfigError(
            f"group: rank {dist.get_rank()} is not a member; pass a group that contains the rank, and call "
            "hf_zero.shard on the group's ranks only"
        )
    _refuse_unserved(group, device)
    if timeout_seconds is None:
        timeout_seconds = ranks.timeout_of(group, device)
    refuse_uneven(shard_size, dist.get_world_size(group))
    if dist.get_world_size(group) == 1:
        return Comm(device, timeout_seconds)
    make = partial(
        _comm_of,
        device=device,
        timeout_seconds=timeout_seconds,
        bucket_nbytes=bucket_nbytes,
        shared_memory=shared_memory,
    )
    own = group
    if _backend(group, device) != "gloo":
        every = range(dist.get_world_size(group))
        own = ranks.communicator(group, every, device, timeout_seconds, "collectives")
    ranks.take_timeout(own, timeout_seconds)
    ranks.exchange_addresses(own, device)
    ranks.same_ranks(group, own)
    comm = make(own)
    if (size := shard_size_of(comm, group, shard_size, fits)) < comm.num_ranks:
        _divide(comm, group, size, make)
    if comm.runs_ahead:
        comm.on_host.barrier()  # raises now if the hosts cannot reach each other
    return comm


def _join(device: torch.device, timeout_seconds: float | None, *, is_world: bool) -> bool:
    """Initializes the process group if a launcher has started several ranks. Returns whether a group exists."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and launched > 1:
        limit = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=limit)
    if not dist.is_initialized():
        return False
    if is_world and "WORLD_SIZE" in os.environ and launched != dist.get_world_size():
        raise ConfigError(
            f"WORLD_SIZE is {launched} but the process group has {dist.get_world_size()} ranks; "
            "launch with torchrun, which sets the environment"
        )
    atexit.unregister(_leave)  # register only once
    atexit.register(_leave)
    return True


def _refuse_unserved(group: dist.ProcessGroup, device: torch.device) -> None:
    served = sorted({each.type for each in group._device_types})
    if dist.get_world_size(group) > 1 and device.type not in served:
        backend = dist.Backend.default_device_backend_map.get(device.type, "BACKEND")
        raise ConfigError(
            f"device: the model is on {device}, but the process group ({dist.get_backend_config(group)}) serves "
            f"only {' and '.join(served)}; move the model to {served[0]}, pass `device`, or create the group with a "
            f"backend for both, such as cpu:gloo,{device.type}:{backend}"
        )


def neighbours(comm: Comm, size: int) -> Comm:
    """Connects groups of neighboring ranks and returns the group of this rank, or `comm` itself if one group contains
    all ranks. Collective. Raises [`ConfigError`] if NCCL would not launch the kernels of two communicators in the same
    order on all ranks."""
    if size == comm.num_ranks:
        return comm
    group: dist.ProcessGroup = comm.group  # type: ignore[attr-defined]
    _refuse_unordered("sequence_parallel", group, comm.device)
    first = comm.rank // size * size
    own = ranks.communicator(group, range(first, first + size), comm.device, comm.timeout_seconds, "neighbours")
    found = _comm_of(own, comm.device, comm.timeout_seconds, "auto", shared_memory=False)
    found.counters.counted_by = comm.counters
    return found


def local_device(device: torch.device | str) -> torch.device:
    """Returns the device with an index: its own, else `LOCAL_RANK`, else the current device if this process does not
    see a device with that index. Raises [`ConfigError`] for MPS."""
    device = torch.device(device)
    if device.type == "mps":
        raise ConfigError(
            "device: mps is not supported, because it has no streams to overlap copies with computation; train on the "
            'CPU, with use_cpu=True in the training arguments or device="cpu" in hf_zero.shard'
        )
    backend = torch.get_device_module(device)
    if device.index is not None or device.type == "cpu" or not hasattr(backend, "current_device"):
        return device
    index = int(os.environ.get("LOCAL_RANK", -1))
    return torch.device(device.type, index if 0 <= index < backend.device_count() else backend.current_device())


def refuse_dividing(group: dist.ProcessGroup | None, dividing: dist.ProcessGroup, device: torch.device) -> None:
    """Raises [`ConfigError`] if several data-parallel ranks hold different parts of the model, or if NCCL would not
    launch the kernels of both groups in the same order on all ranks."""
    if device.type in {each.type for each in dividing._device_types}:
        _refuse_unordered("tensor parallelism", dividing, device)
    peers = set(dist.get_process_group_ranks(dividing)) & set(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(peers) > 1:
        raise ConfigError(
            f"group: ranks {sorted(peers)} hold different parts of the model, so they cannot be data-parallel ranks "
            "of one group; omit `group`, or pass the mesh's data-parallel axis, such as mesh['fsdp'].get_group()"
        )


def ranks_alike(dividing: dist.ProcessGroup, timeout_seconds: float | None) -> dist.ProcessGroup:
    """Returns the group of the ranks that hold the same part of the model as this one. All ranks of the world call it.
    Raises [`ConfigError`] if the ranks do not form a grid of data-parallel by tensor-parallel ranks."""
    own = dist.get_process_group_ranks(dividing)
    divisions: list = [None] * dist.get_world_size()
    dist.all_gather_object(divisions, own)
    position = own.index(dist.get_rank())
    alike = sorted({members[position] for members in divisions if len(members) == len(own)})
    if len(alike) * len(own) != len(divisions):
        raise ConfigError(
            f"the {len(divisions)} ranks do not form a grid of data-parallel by {len(own)} tensor-parallel ranks; "
            "pass the data-parallel ranks to hf_zero.shard as `group`"
        )
    limit = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    return ranks.make_group(alike, timeout=limit)


def _divide(comm: Comm, group: dist.ProcessGroup, shard_size: int, make: Callable[..., Comm]) -> None:
    """Divides connected ranks into shard groups of equal size. Collective."""
    _refuse_unordered("shard_size", group, comm.device)
    parts = groups_of(group, shard_size, comm.device, comm.timeout_seconds)
    shard_group, replicate_group = make(parts["shard"]), make(parts["replicate"])
    # shards are laid out differently in shared memory, so either all groups use it or none
    if len(set(comm.all_gather_object(shard_group.shared_memory is not None, what="connecting the ranks"))) > 1:
        shard_group = make(parts["shard"], shared_memory=False)
    comm.divide(shard_group, replicate_group, Average(shard_group, replicate_group))


def _comm_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_seconds: float,
    bucket_nbytes: int | str,
    shared_memory: bool,
) -> Comm:
    """Creates the collectives of a process group. Collective."""
    if dist.get_world_size(group) == 1:
        return Comm(device, timeout_seconds)
    kind: Callable[..., Comm] = NativeComm
    extra: list = []
    if _backend(group, device) == "gloo":
        kind, extra = _gloo_kind_of(group, device, shared_memory)
    if bucket_nbytes == "auto":
        bucket_nbytes = _bucket_nbytes(kind, group)
    return kind(group, device, timeout_seconds, bucket_nbytes, *extra)


def _gloo_kind_of(
    group: dist.ProcessGroup, device: torch.device, shared_memory: bool
) -> tuple[Callable[..., Comm], list]:
    """Returns the class of the collectives for gloo, and further arguments of its constructor. Raises [`ConfigError`]
    for devices other than the CPU."""
    if device.type != "cpu":
        raise ConfigError(
            f"device: the model is on {device}, but gloo only exchanges CPU tensors; create the process group with a "
            "backend for the device, such as nccl, or train on the CPU"
        )
    peers, why = connect_peers(group) if shared_memory else (None, None)
    if why is not None and dist.get_rank(group) == 0:
        logger.warning("hf_zero: ranks of one host send messages instead of sharing memory: %s", why)
    return (PairwiseComm, []) if peers is None else (SharedComm, [peers])


def _bucket_nbytes(kind: Callable[..., Comm], group: dist.ProcessGroup) -> int:
    if kind is NativeComm:
        num_hosts = len(set(ranks.hosts(group)))
        return native_bucket_nbytes(dist.get_world_size(group), num_hosts, ranks.least_device_nbytes(group))
    return SHARED_NBYTES if kind is SharedComm else MESSAGES_NBYTES


def _refuse_unordered(setting: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Calls `refuse_unordered` if NCCL serves the device."""
    if _backend(group, device) == "nccl":
        refuse_unordered(setting, torch.cuda.nccl.version())


def _leave() -> None:
    """Waits briefly at the end of the program so that the backend's threads can finish.

    gloo's threads release a collective shortly after it has been waited for, and need the interpreter to do so. Doing
    so during interpreter shutdown aborts the process (seen in 2 of 8 runs of a few seconds, with torch 2.13).
    """
    time.sleep(0.1)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the backend for `device`: a group may be configured as "cpu:gloo,cuda:nccl"."""
    return group._get_backend(device).name().lower()
