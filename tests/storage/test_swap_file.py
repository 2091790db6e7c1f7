"""Files in which tensors rest: what is written comes back, what cannot be is one clear line, and nothing is left."""

import errno
import gc
import logging
import mmap
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hf_zero.comm import Comm
from hf_zero.errors import StorageError
from hf_zero.storage import Speed, SwapFile, in_pages, swap_file
from tests.distributed import RemoteError, run_ranks


PAGE = 4096


def world_of_one() -> Comm:
    return Comm(torch.device("cpu"), 60.0)


def memory(num_pages: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_pages * PAGE), dtype=torch.uint8)


def random(num_pages: int, seed: int) -> torch.Tensor:
    filled = memory(num_pages)
    return filled.copy_(torch.randint(0, 256, filled.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(swap_file, "PIECE_NBYTES", 3 * PAGE)  # several pieces, the last one shorter
    file = SwapFile.open(world_of_one(), tmp_path)
    yield file
    file.close()
    assert not list(tmp_path.iterdir())


def check_round_trips(file: SwapFile) -> None:
    """Three ranges of several pieces, written at once and read in another order, beside a range of zeros."""
    comm, values = world_of_one(), [random(num_pages, num_pages) for num_pages in (1, 7, 30)]
    starts = [file.reserve(comm, value.numel() - 100) for value in values]
    assert starts == [0, PAGE, 8 * PAGE]
    empty = file.reserve(comm, 5)
    for pending in [file.write(start, value) for start, value in zip(starts, values)]:
        pending.wait()
    for start, value in reversed(list(zip(starts, values))):
        read = memory(value.numel() // PAGE)
        file.read(start, read).wait()
        assert torch.equal(read, value)
    zeros = random(1, 5)
    file.read(empty, zeros).wait()
    assert not zeros.any()
    assert in_pages(1) == in_pages(PAGE) == PAGE and file.nbytes == 39 * PAGE


@pytest.mark.quick
def test_what_is_written_is_read_and_counted(file):
    check_round_trips(file)
    assert file._counters.sent_nbytes == {"disk write": 38 * PAGE, "disk read": 39 * PAGE}


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_without_direct_access_is_used_without_it(tmp_path, monkeypatch, refuses):
    real_open, real_write, seen = os.open, os.pwritev, []

    def no_direct_open(path, flags, *mode, **others):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *mode, **others)

    def no_direct_write(descriptor, *where):
        if descriptor == direct:
            seen.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(descriptor, *where)

    if refuses == "open":
        monkeypatch.setattr(os, "open", no_direct_open)
    file = SwapFile.open(world_of_one(), tmp_path)
    if refuses == "write":
        direct = file._descriptor
        monkeypatch.setattr(os, "pwritev", no_direct_write)
        if not file.is_direct:
            pytest.skip("the file system of this test has no direct access")
    check_round_trips(file)
    assert not file.is_direct and bool(seen) == (refuses == "write")
    file.close()


def test_short_reads_and_writes_are_gone_on_with(file, monkeypatch):
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        # more than a page and not whole pages, as at a signal
        monkeypatch.setattr(os, name, lambda fd, views, at, real=real: min(real(fd, views, at), PAGE + 512))
    check_round_trips(file)


@pytest.mark.quick
def test_reads_and_writes_of_one_range_keep_their_order(file, monkeypatch):
    """A write waits for the read before it, a read for the write before it, however slow those are."""
    file.reserve(world_of_one(), 8 * PAGE)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def late(fd, views, at, real=real):
            if at < 2 * PAGE:
                time.sleep(0.02)  # the first piece comes last
            return real(fd, views, at)

        monkeypatch.setattr(os, name, late)
    one, two, seen, last = random(8, 1), random(8, 2), memory(8), memory(2)
    file.write(0, one)
    reading = file.read(0, seen)
    file.write(4 * PAGE, two[4 * PAGE :])
    file.write(0, two[: 4 * PAGE])
    file.read(3 * PAGE, last).wait()
    reading.wait()
    assert torch.equal(seen, one) and torch.equal(last, two[3 * PAGE : 5 * PAGE])


@pytest.mark.parametrize("way", ["read", "write"])
def test_what_the_disk_refuses_is_raised_by_who_waits_and_by_all_that_follows(file, monkeypatch, way):
    start, good = file.reserve(world_of_one(), 10 * PAGE), os.preadv if way == "read" else os.pwritev

    def refused(fd, views, at):
        if at == 6 * PAGE:  # one piece alone: of two that fail, either may be the first
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return good(fd, views, at)

    monkeypatch.setattr(os, "preadv" if way == "read" else "pwritev", refused)
    pending = getattr(file, way)(start, random(10, 1))
    verb = {"read": "reading", "write": "writing"}[way]
    message = rf"^offload_dir {file.folder} \(rank 0\): {verb} 12288 bytes failed \(Input/output error\).*resume from"
    with pytest.raises(StorageError, match=message):
        pending.wait()
    with pytest.raises(StorageError, match=message):
        file.write(start, random(1, 1))
    with pytest.raises(StorageError, match=message):
        file.read(start, memory(1))


def test_a_file_that_ends_early_is_an_error_and_not_zeros(file):
    start = file.reserve(world_of_one(), 10 * PAGE)
    os.ftruncate(file._plain, 4 * PAGE)
    with pytest.raises(StorageError, match="reading .* bytes failed .end of file after"):
        file.read(start, memory(10)).wait()


def test_a_folder_that_is_missing_or_not_writable_is_refused(tmp_path):
    with pytest.raises(
        StorageError, match=rf"^offload_dir {tmp_path}/none: rank 0 does not see this folder; create it"
    ):
        SwapFile.open(world_of_one(), tmp_path / "none")
    with pytest.raises(StorageError, match=r"^offload_dir /sys: Permission denied \(/sys/\.hf_zero.*is writable"):
        SwapFile.open(world_of_one(), "/sys")


def test_a_full_disk_is_refused_with_both_numbers_and_what_was_there_stays(file, monkeypatch):
    comm, value = world_of_one(), random(2, 3)
    file.write(file.reserve(comm, 2 * PAGE), value).wait()
    with pytest.raises(StorageError, match=r"rank 0\): needs another 1,048,576.0 TiB, but only [\d.,]+ .iB are f"):
        file.reserve(comm, 2**60)

    def full(descriptor, start, nbytes):
        os.ftruncate(descriptor, start + nbytes // 2)  # so much was still there when it began
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="No space left on device.; free space"):
        patched.setattr(os, "posix_fallocate", full)
        file.reserve(comm, 8 * PAGE)
    assert os.fstat(file._plain).st_size == 2 * PAGE == file.nbytes
    read = memory(2)
    file.read(0, read).wait()
    assert torch.equal(read, value)


def refuse_on_rank_1(folder: str) -> str:
    comm = _connected()
    file = SwapFile.open(comm, folder)
    assert not list(Path(folder).iterdir())
    file.write(file.reserve(comm, PAGE), memory(1).fill_(comm.rank)).wait()
    comm.barrier()
    file.read(0, read := memory(1)).wait()
    assert (read == comm.rank).all()  # each rank has its own file
    with pytest.raises(StorageError) as full:
        file.reserve(comm, 2**60 if comm.rank == 1 else PAGE)
    with pytest.raises(StorageError) as missing:
        SwapFile.open(comm, folder if comm.rank == 0 else f"{folder}/none")
    return f"{full.value} {missing.value}"


def _connected() -> Comm:
    from hf_zero.comm import connect

    return connect(torch.device("cpu"), timeout_seconds=60.0, bucket_nbytes=2**16)


def test_what_one_rank_is_refused_all_ranks_raise(tmp_path):
    first, second = run_ranks(refuse_on_rank_1, 2, str(tmp_path))
    assert "rank 1 failed: StorageError" in first and "are free" in first and "does not see this folder" in first
    assert "are free" in second and "rank 1 failed" not in second


def write_and_die(folder: str) -> None:
    file = SwapFile.open(world_of_one(), folder)
    file.write(file.reserve(world_of_one(), 64 * PAGE), memory(64).fill_(7))
    Path(folder, "written").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing_in_the_folder(tmp_path):
    with pytest.raises(RemoteError) as caught:
        run_ranks(write_and_die, 1, str(tmp_path))
    assert caught.value.kind == "Died"
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


def test_a_file_that_nobody_has_any_more_gives_its_space_back(tmp_path):
    file = SwapFile.open(world_of_one(), tmp_path)
    file.write(file.reserve(world_of_one(), 64 * PAGE), memory(64))
    descriptors = {os.readlink(f"/proc/self/fd/{number}") for number in (file._plain, file._descriptor)}
    assert all(name.endswith(" (deleted)") for name in descriptors)
    try:
        raise ValueError("in training")
    except ValueError:
        del file
    gc.collect()
    opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert not descriptors & {os.readlink(path) for path in opened if os.path.lexists(path)}


def test_the_speed_is_told_and_a_slow_disk_is_warned_of(file, monkeypatch, caplog):
    comm = world_of_one()
    file.reserve(comm, 20 * PAGE)
    found = Speed.measure(file, comm)
    assert found.read > 0 and found.write > 0
    read = random(20, 0)
    file.read(0, read).wait()
    assert not read.any()  # the file is as it was
    monkeypatch.setattr(file, "nbytes", 40 * 10**9)
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        Speed(read=2e9, write=4e9).log(file, "masters")
        Speed(read=2e9, write=1e8).log(file, "masters")
    fast, slow = caplog.records
    assert fast.levelname == "INFO" and "40.00 GB of masters" in fast.message and "at least 30.0 s" in fast.message
    assert slow.levelname == "WARNING" and "written at 100 MB/s" in slow.message and "420.0 s; this is" in slow.message
