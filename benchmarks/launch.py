"""Starts a fresh group of ranks for each task, and looks at what they leave in shared memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from tests.distributed import run_new_ranks
from tests.hosts.network import Host


LEFT_BY_PEERS = ("deepspeed",)  # names in /dev/shm that a peer does not remove itself

# FSDP2's host tensors and the norms of them are reduced by gloo, those of a GPU by nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def run_group(
    task: str,
    spec: dict,
    *,
    num_processes: int,
    timeout: float,
    backend: str = "gloo",
    start: str = "forkserver",
    hosts: Sequence[Host] = (),
) -> list:
    """Runs a task in processes that have done nothing before, as threaded as `OMP_NUM_THREADS` says.

    Args:
        task: "module:function", called as `function(spec, rank)`; what it returns is sent back.
        spec: picklable settings.
        num_processes: ranks.
        timeout: seconds after which the group is ended.
        backend: of the default process group.
        start, hosts: as for `run_new_ranks`.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RemoteError: with the first failing rank's traceback.
    """
    num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    settings = {"timeout": timeout, "backend": backend, "start": start, "num_threads": num_threads}
    settings["hosts"] = hosts
    return run_new_ranks(_run_task, num_processes, task, spec, **settings)


def _run_task(task: str, spec: dict):
    os.dup2(2, 1)  # stdout is for the tables alone
    module, _, function = task.partition(":")
    return getattr(importlib.import_module(module), function)(spec, int(os.environ["RANK"]))


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, semaphores left out: other programs' semaphores come and go."""
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not name.startswith("sem.")}


def remove_shared_memory(before: set[str], prefixes: tuple[str, ...]) -> list[str]:
    """Removes new files of a peer known to leave some behind; returns the names of all that were left.

    Args:
        before: what `shared_memory_files()` gave before the run.
        prefixes: names to remove. Other leftovers are only reported: they may belong to somebody else.
    """
    left = sorted(shared_memory_files() - before)
    for name in left:
        path = Path("/dev/shm") / name
        if name.startswith(prefixes) and path.is_file() and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)
    return left
