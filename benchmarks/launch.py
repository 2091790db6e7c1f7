"""Starts a fresh group of ranks for each task."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.distributed import RemoteError, run_new_ranks
from tests.hosts.network import Host


# FSDP2's host tensors and their norms are reduced by gloo, those of a GPU by NCCL.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
SHARED_MEMORY = Path("/dev/shm")


def set_environment(threads: int, device: str = "cpu") -> None:
    """Must be called before the server process starts, because ranks inherit the environment."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("DS_BUILD_OPS", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def attempt(entry: dict, label: str, task: str, spec: dict, **group) -> list | None:
    """Runs a task as `run_group` does. If it fails, prints the error, stores it in `entry["error"]` and returns None,
    as do all later calls with that entry."""
    if entry["error"]:
        return None
    before, start = _deepspeed_files(), time.monotonic()
    try:
        return run_group(task, spec, **group)
    except RemoteError as error:
        entry["error"] = str(error)
        print(f"{label}: {error}", file=sys.stderr, flush=True)
        return None
    finally:
        for path in _deepspeed_files() - before:
            path.unlink(missing_ok=True)
        print(f"  {label}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def run_group(
    task: str, spec: dict, *, num_processes: int, timeout: float, device: str = "cpu", hosts: Sequence[Host] = ()
) -> list:
    """Runs a task in processes that have done nothing before, with `OMP_NUM_THREADS` threads each.

    Args:
        task: "module:function", called as `function(spec, rank)`.
        spec: picklable settings; the task also finds `device` there.
        num_processes: number of ranks.
        timeout: seconds after which the group is ended.
        device: "cpu" or "cuda".
        hosts: as for `run_new_ranks`.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RemoteError: with the first failing rank's traceback.
    """
    return run_new_ranks(
        _run_task,
        num_processes,
        task,
        spec | {"device": device},
        timeout=timeout,
        backend=BACKENDS[device],
        start="spawn" if device == "cuda" else "forkserver",
        num_threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        hosts=hosts,
    )


def _run_task(task: str, spec: dict):
    os.dup2(2, 1)  # stdout is for tables only
    module, _, function = task.partition(":")
    return getattr(importlib.import_module(module), function)(spec, int(os.environ["RANK"]))


def _deepspeed_files() -> set[Path]:
    """Shared memory that DeepSpeed does not remove itself."""
    return {path for path in SHARED_MEMORY.glob("deepspeed*") if path.stat().st_uid == os.getuid()}
