"""The size of a bucket, large enough that the latency of a piece counts for little beside its transfer."""

import math
import time
from collections.abc import Callable
from zlib import crc32

import torch

from hf_zero.comm.distributed import DistributedComm
from hf_zero.comm.rendezvous import host_name


MIN_NBYTES, MAX_NBYTES = 2**20, 64 * 2**20
# A piece takes this many times as long as a message of nothing.
TIMES_LATENCY = 16
# NCCL's order of summation may depend on the size of a piece, and a run must repeat: nothing is measured there. Some
# 20 microseconds of latency are 2 to 12 % of 32 MiB within a host, 1 to 3 % of 64 MiB over its network.
ONE_HOST_NBYTES, SEVERAL_HOSTS_NBYTES = 32 * 2**20, 64 * 2**20
PROBE_NBYTES, NUM_PROBES = 2 * 2**20, 12


def bucket_of_link(comm: DistributedComm) -> tuple[int, str]:
    """Measures how fast messages go around, with every rank sending at once. All ranks call it, and agree.

    Args:
        comm (`DistributedComm`): the ranks, with tensors on the CPU.

    Returns:
        `tuple[int, str]`: bytes, and why.
    """
    nothing = torch.zeros(2, 1, dtype=torch.uint8)
    much = torch.zeros(2, PROBE_NBYTES, dtype=torch.uint8)
    own = torch.tensor([_seconds_of(lambda: _pass_on(comm, *nothing)), _seconds_of(lambda: _pass_on(comm, *much))])
    latency, transfer = comm.all_gather_vector(own).amax(0).tolist()
    nbytes = bucket_nbytes(latency, max(transfer - latency, 1e-9) / PROBE_NBYTES)
    return nbytes, f"latency {latency * 1e6:.0f} us, {PROBE_NBYTES / transfer / 1e9:.2f} GB/s"


def bucket_of_hosts(comm: DistributedComm) -> tuple[int, str]:
    """Chooses by whether all ranks are on one host. All ranks call it, and agree.

    Returns:
        `tuple[int, str]`: bytes, and why.
    """
    own = torch.tensor([crc32(_host().encode())], device=comm.device)
    hosts = comm.all_gather_vector(own).unique().numel()
    return (ONE_HOST_NBYTES, "ranks of one host") if hosts == 1 else (SEVERAL_HOSTS_NBYTES, f"ranks of {hosts} hosts")


def _host() -> str:
    try:
        return host_name() or ""
    except OSError:  # on this rank alone; it takes part all the same
        return ""


def bucket_nbytes(latency: float, seconds_per_byte: float) -> int:
    """Returns the power of two, within bounds, whose transfer takes `TIMES_LATENCY` latencies or more.

    Args:
        latency (`float`): seconds.
        seconds_per_byte (`float`): of a long message.
    """
    wanted = TIMES_LATENCY * latency / seconds_per_byte
    return min(max(2 ** math.ceil(math.log2(max(wanted, 1))), MIN_NBYTES), MAX_NBYTES)


def _pass_on(comm: DistributedComm, sent: torch.Tensor, received: torch.Tensor) -> None:
    after, before = (comm.rank + 1) % comm.num_ranks, (comm.rank - 1) % comm.num_ranks
    comm.exchange([(sent, after)], [(received, before)], what="bandwidth").wait()


def _seconds_of(act: Callable[[], None]) -> float:
    """Returns the shortest time of a few: the first one also connects the ranks."""
    seconds = []
    for _ in range(NUM_PROBES):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
