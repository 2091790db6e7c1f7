"""Which collectives this process needs: none, pairwise exchange, or the backend's own."""

import atexit
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_zero.comm.base import Comm
from hf_zero.comm.native import NativeComm
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.peers import meet
from hf_zero.comm.shared import SharedComm
from hf_zero.comm.staged import StagedComm
from hf_zero.errors import ConfigError


def connect(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float,
    bucket_nbytes: int,
    shared_memory: bool = True,
) -> Comm:
    """Joins the data-parallel ranks. One process that nobody launched as one of several is the world of one rank.

    Args:
        device (`torch.device`): where the tensors live.
        group (`dist.ProcessGroup`, *optional*): the data-parallel ranks; the whole world when `None`.
        timeout_seconds (`float`): how long one exchange may take.
        bucket_nbytes (`int`): size in bytes of the staging buffer of the pairwise exchange.
        shared_memory (`bool`): lets gloo's ranks, where they are all on one host, share memory instead.

    Raises:
        `ConfigError`: when the launcher's `WORLD_SIZE` and the process group disagree.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and launched > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    if not dist.is_initialized():
        return Comm(device, timeout_seconds)
    if group is None and "WORLD_SIZE" in os.environ and launched != dist.get_world_size():
        raise ConfigError(
            f"WORLD_SIZE is {launched} but the process group has {dist.get_world_size()} ranks; "
            "launch with torchrun, and let it set the environment"
        )
    atexit.unregister(_leave)  # once is enough
    atexit.register(_leave)
    group = group or dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return Comm(device, timeout_seconds)
    if _backend(group, device) != "gloo":
        return NativeComm(group, device, timeout_seconds)
    if device.type != "cpu":
        return StagedComm(group, device, timeout_seconds, bucket_nbytes)
    connections = meet(group) if shared_memory else None
    if connections:
        return SharedComm(group, device, timeout_seconds, bucket_nbytes, connections)
    return PairwiseComm(group, device, timeout_seconds, bucket_nbytes)


def _leave() -> None:
    """At the end of the program, lets the backend's threads come to rest.

    gloo's threads drop a collective shortly after it is waited for, and need the interpreter to do so: one that comes
    to it while the interpreter ends aborts the process (seen in 2 of 8 runs of a few seconds, with torch 2.13).
    """
    time.sleep(0.1)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves `device`: a group may be configured as "cpu:gloo,cuda:nccl"."""
    return group._get_backend(device).name().lower()
