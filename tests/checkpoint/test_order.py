"""What is on disk before what: all that a save has written, before any of it gets its name."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_zero.checkpoint import save_checkpoint, save_pretrained
from tests.checkpoint import models
from tests.checkpoint.subjects import optimizer_of, run_ranks, sharded


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are named by Linux's /proc")


@dataclass(frozen=True)
class Event:
    """What a rank asked the system for.

    Args:
        at (`int`): nanoseconds, of a clock that all processes share.
        rank (`int`): which.
        kind (`str`): "write", "sync" or "rename".
        path (`str`): what; the new name for a rename.
        content (`dict[str, str]`): at a sync, what then is on disk: the digest of a file, or the names in a folder;
            at a rename, all that gets a name by it, and what is in it.
    """

    at: int
    rank: int
    kind: str
    path: str
    content: dict


def held(path: Path) -> str:
    """A file's digest, or the names in a folder."""
    if path.is_dir():
        return " ".join(sorted(os.listdir(path)))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recording(patch: pytest.MonkeyPatch, rank: int) -> list[Event]:
    """Writes down, from now on, what this process asks the system for."""
    events: list[Event] = []
    fsync, pwrite, renames = os.fsync, os.pwrite, {"rename": os.rename, "replace": os.replace}

    def note(kind: str, path: str, content: dict) -> None:
        events.append(Event(time.monotonic_ns(), rank, kind, path, content))

    def noted_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        before = held(path)
        fsync(descriptor)
        note("sync", str(path), {str(path): before})

    def noted_pwrite(descriptor: int, *args) -> int:
        note("write", os.readlink(f"/proc/self/fd/{descriptor}"), {})
        return pwrite(descriptor, *args)

    def noted(rename):
        def call(source, target) -> None:
            tree = [Path(source), *Path(source).rglob("*")]
            content = {str(path): held(path) for path in tree}
            rename(source, target)
            note("rename", str(target), content)

        return call

    patch.setattr(os, "fsync", noted_fsync)
    patch.setattr(os, "pwrite", noted_pwrite)
    for name, rename in renames.items():
        patch.setattr(os, name, noted(rename))
    return events


def save(comm, folder, how):
    engine = sharded(models.tied_llama(), half=True)
    optimizer = optimizer_of(engine)
    if how == "in place":  # adds to what is there
        save_pretrained(engine, folder / "out")
    comm.barrier()
    with pytest.MonkeyPatch.context() as patch:
        events = recording(patch, comm.rank)
        if how == "checkpoint":
            save_checkpoint(engine, optimizer, folder / "new" / "out")
        else:
            save_pretrained(engine, folder / "out", max_shard_size="5KB")
    everyones = comm.all_gather_object(events)
    if comm.rank == 0:
        events = sorted((event for of_rank in everyones for event in of_rank), key=lambda event: event.at)
        assert_in_order(events, comm.num_ranks)


def assert_in_order(events: list[Event], num_ranks: int) -> None:
    events = [event for event in events if event.kind != "rename" or "_saving-" not in event.path]  # no final names
    renames = [index for index, event in enumerate(events) if event.kind == "rename"]
    assert renames and {events[index].rank for index in renames} == {0}
    first = renames[0]
    # on a network file system a process can only answer for what it has written itself
    for rank in range(num_ranks):
        own = [event for event in events if event.rank == rank]
        for path in {event.path for event in own if event.kind == "write"}:
            kinds = [event.kind for event in own if event.path == path]
            assert kinds[-1] == "sync", f"rank {rank} wrote {path} and did not wait until it was on disk"
            last = max(event.at for event in own if event.path == path and event.kind == "write")
            assert any(event.at > last and event.path == path for event in own if event.kind == "sync")
        wrote = [event.at for event in own if event.kind == "write"]
        assert wrote and max(wrote) < events[first].at, "a rank writes after the rename"
    on_disk: dict[str, str] = {}
    for event in events:
        if event.kind == "sync":
            on_disk.update(event.content)
        elif event.kind == "rename":
            for path, content in event.content.items():
                assert on_disk.get(path) == content, f"{path} got its name before it was on disk"
    for index in renames:
        parent = os.path.dirname(events[index].path)
        synced = [event for event in events[index:] if event.kind == "sync" and event.path == parent]
        assert synced, f"the new names in {parent} are not on disk"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ["checkpoint", "model", "in place"])
def test_all_is_on_disk_before_it_gets_its_name_and_the_name_is_before_it_is_said(tmp_path, how, num_ranks):
    run_ranks(save, num_ranks, tmp_path, how)
