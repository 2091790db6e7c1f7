"""What the ranks of test_launch do."""

import time

import torch
import torch.distributed as dist

from benchmarks import counters


def send_known_bytes(spec: dict, rank: int) -> float:
    """A ring of sends of known size; returns what the process wrote to its sockets meanwhile."""
    tensor = torch.zeros(spec["nbytes"], dtype=torch.uint8)
    other = torch.empty_like(tensor)
    dist.barrier()
    before = counters.written_nbytes()
    dist.send(tensor, 1 - rank) if rank == 0 else dist.recv(other, 0)
    dist.barrier()
    return counters.written_nbytes() - before


def raise_on_last_rank(spec: dict, rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        raise ValueError("the reason")
    dist.barrier()


def sleep(spec: dict, rank: int) -> None:
    time.sleep(spec["seconds"])
