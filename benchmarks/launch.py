"""Starts a fresh group of ranks, waits for their results, and leaves nothing behind.

Ranks are forked from a server process that has imported torch and transformers and done nothing else. So every
(round, mode) begins with the same clean process, no idle mode holds memory or cores, and the start costs little.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path


# FSDP2's host tensors and the norms of them are reduced by gloo, those of a GPU by nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class GroupError(RuntimeError):
    """A rank raised, died, or did not answer in time; the whole group has been ended."""


def run_group(
    task: str, spec: dict, *, num_processes: int, timeout: float, backend: str = "gloo", start: str = "forkserver"
) -> list:
    """Runs a task in fresh processes with an initialised process group.

    Args:
        task: "module:function", called as `function(spec, rank)`; what it returns is sent back. A name, so that the
            starting process need not import it.
        spec: picklable settings.
        num_processes: ranks.
        timeout: seconds after which the group is ended.
        backend: of the default process group.
        start: how processes start; "spawn" where CUDA is used, which a forked process may not be able to open.

    Returns:
        What each rank returned, in rank order.

    Raises:
        GroupError: with the first failing rank's traceback.
    """
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["benchmarks.preload"])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        world = {"world_size": num_processes, "backend": backend, "store": str(Path(folder) / "store")}
        pipes, processes, patience = [], [], 0.0
        try:
            for rank in range(num_processes):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_enter, args=(task, spec, rank, world, sender))
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            results = _collect(pipes, processes, time.monotonic() + timeout)
            patience = 10.0
            return results
        finally:
            _end(processes, patience)


def _collect(pipes: list, processes: list, deadline: float) -> list:
    results = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise GroupError(f"no answer in time from rank(s) {sorted(waiting.values())}; the group was ended")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                status, value = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                raise GroupError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if status == "error":
                raise GroupError(f"rank {rank}: {value}")
            results[rank] = value
    return results


def _end(processes: list, patience: float) -> None:
    """Gives the ranks some seconds to leave by themselves, then ends them: by their own ids, never by name."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def _enter(task: str, spec: dict, rank: int, world: dict, sender) -> None:
    """The life of one rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is for the tables alone
    try:
        _join_world(rank, world)
        module, _, function = task.partition(":")
        sender.send(("ok", getattr(importlib.import_module(module), function)(spec, rank)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    finally:
        sender.close()
        _leave_world()


def _end_with_parent() -> None:
    """Ends this rank when the starting process is gone, whatever ended that; asleep until then."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _join_world(rank: int, world: dict) -> None:
    import torch
    import torch.distributed as dist

    size = world["world_size"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(world["backend"], init_method=f"file://{world['store']}", rank=rank, world_size=size)


def _leave_world() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


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
