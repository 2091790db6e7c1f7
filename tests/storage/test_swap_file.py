"""Files that store tensors: what is written is read again, errors are one clear line, and nothing is left behind."""

import errno
import gc
import mmap
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hf_zero.comm import Comm, connect
from hf_zero.errors import StorageError
from hf_zero.storage import READ, WRITE, SwapFile
from tests.distributed import RemoteError, run_ranks


PAGE = 4096
COMM = Comm(torch.device("cpu"), 60.0)


def memory(num_pages: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_pages * PAGE), dtype=torch.uint8)


def random(num_pages: int, seed: int) -> torch.Tensor:
    filled = memory(num_pages)
    return filled.copy_(torch.randint(0, 256, filled.shape, generator=torch.Generator().manual_seed(seed)))


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def file(tmp_path):
    yield SwapFile(COMM, tmp_path)
    assert not list(tmp_path.iterdir())


def check_round_trips(file: SwapFile) -> None:
    """Three ranges, written together and read in another order, beside a range of zeros."""
    values = [random(num_pages, num_pages) for num_pages in (1, 7, 30)]
    starts = [file.reserve(value.numel() - 100) for value in values]
    assert starts == [0, PAGE, 8 * PAGE]
    empty = file.reserve(5)
    file.transfer(WRITE, list(zip(starts, values)))
    for start, value in reversed(list(zip(starts, values))):
        file.transfer(READ, [(start, read := memory(value.numel() // PAGE))]).wait()
        assert torch.equal(read, value)
    file.transfer(READ, [(empty, zeros := random(1, 5))]).wait()
    assert not zeros.any() and file.nbytes == 39 * PAGE


@pytest.mark.quick
def test_what_is_written_is_read_and_counted(file):
    before = dict(COMM.counters.sent_nbytes)
    check_round_trips(file)
    for way, num_pages in (("disk write", 38), ("disk read", 39)):
        assert COMM.counters.sent_nbytes[way] - before.get(way, 0) == num_pages * PAGE


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_system_without_direct_io_is_used_without_it(tmp_path, monkeypatch, call):
    real = getattr(os, call)

    def refuses(where, *args):
        is_direct = args[0] if call == "open" else flags_of(where)
        if is_direct & os.O_DIRECT:
            raise error_of(errno.EINVAL)
        return real(where, *args)

    monkeypatch.setattr(os, call, refuses)
    file = SwapFile(COMM, tmp_path)
    check_round_trips(file)
    assert not flags_of(file._io) & os.O_DIRECT


def flags_of(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def test_short_reads_and_writes_are_continued(file, monkeypatch):
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        # more than a page and not whole pages, as at a signal
        monkeypatch.setattr(os, name, lambda fd, views, at, real=real: min(real(fd, views, at), PAGE + 512))
    check_round_trips(file)


@pytest.mark.quick
def test_reads_and_writes_keep_their_order(file, monkeypatch):
    file.reserve(8 * PAGE)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *where: time.sleep(0.02) or real(*where))
    one, two, seen, last = random(8, 1), random(8, 2), memory(8), memory(2)
    file.transfer(WRITE, [(0, one)])
    file.transfer(READ, [(0, seen)])
    file.transfer(WRITE, [(4 * PAGE, two[4 * PAGE :]), (0, two[: 4 * PAGE])])
    file.transfer(READ, [(3 * PAGE, last)]).wait()
    assert torch.equal(seen, one) and torch.equal(last, two[3 * PAGE : 5 * PAGE])


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_failure_is_raised_by_its_waiter_and_by_all_that_follow(file, monkeypatch, way):
    file.reserve(10 * PAGE)

    def refused(*_):
        raise error_of(errno.EIO)

    monkeypatch.setattr(os, f"p{way}v", refused)
    message = rf"^offload_dir {file.folder} \(rank 0\): a disk {way} failed \(Input/output error\).*resume from"
    pending = file.transfer(f"disk {way}", [(0, random(10, 1))])
    for each in (pending, file.transfer(WRITE, [(0, random(1, 1))]), file.transfer(READ, [(0, memory(1))])):
        with pytest.raises(StorageError, match=message):
            each.wait()


def test_a_file_that_ends_early_is_an_error_and_not_zeros(file):
    file.reserve(10 * PAGE)
    os.ftruncate(file._descriptor, 4 * PAGE)
    with pytest.raises(StorageError, match="a disk read failed .end of file after"):
        file.transfer(READ, [(0, memory(10))]).wait()


def test_a_folder_that_is_missing_or_not_writable_is_refused(tmp_path):
    with pytest.raises(
        StorageError, match=rf"^offload_dir {tmp_path}/none: rank 0 does not see this folder; create it"
    ):
        SwapFile(COMM, tmp_path / "none")
    with pytest.raises(StorageError, match=r"^offload_dir /sys: Permission denied \(/sys/\.hf_zero.*is writable"):
        SwapFile(COMM, "/sys")


def test_a_full_disk_is_refused_with_both_numbers_and_values_stay(file, monkeypatch):
    file.transfer(WRITE, [(file.reserve(2 * PAGE), value := random(2, 3))])
    with pytest.raises(StorageError, match=r"rank 0\): needs another 1,048,576.0 TiB, but only [\d.,]+ .iB are f"):
        file.reserve(2**60)

    def full(*_):
        raise error_of(errno.ENOSPC)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left on device.; free space"):
        file.reserve(8 * PAGE)
    file.transfer(READ, [(0, read := memory(2))]).wait()
    assert torch.equal(read, value) and file.nbytes == 2 * PAGE


def refuse_on_rank_1(folder: str) -> str:
    comm = connect(torch.device("cpu"), timeout_seconds=60.0, bucket_nbytes=2**16)
    file = SwapFile(comm, folder)
    assert not list(Path(folder).iterdir())
    file.transfer(WRITE, [(file.reserve(PAGE), memory(1).fill_(comm.rank))]).wait()
    comm.barrier()
    file.transfer(READ, [(0, read := memory(1))]).wait()
    assert (read == comm.rank).all()  # each rank has its own file
    with pytest.raises(StorageError) as full:
        file.reserve(2**60 if comm.rank == 1 else PAGE)
    with pytest.raises(StorageError) as missing:
        SwapFile(comm, folder if comm.rank == 0 else f"{folder}/none")
    return f"{full.value} {missing.value}"


def test_a_refusal_on_one_rank_is_raised_on_all_ranks(tmp_path):
    first, second = run_ranks(refuse_on_rank_1, 2, str(tmp_path))
    assert "rank 1 failed: StorageError" in first and "are free" in first and "does not see this folder" in first
    assert "are free" in second and "rank 1 failed" not in second


def write_and_die(folder: str) -> None:
    file = SwapFile(COMM, folder)
    file.transfer(WRITE, [(file.reserve(64 * PAGE), memory(64).fill_(7))])
    Path(folder, "written").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing_in_the_folder(tmp_path):
    with pytest.raises(RemoteError) as caught:
        run_ranks(write_and_die, 1, str(tmp_path))
    assert caught.value.kind == "Died"
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


def test_an_unreferenced_file_frees_its_space(tmp_path):
    file = SwapFile(COMM, tmp_path)
    file.transfer(WRITE, [(file.reserve(64 * PAGE), memory(64))]).wait()
    descriptors = {os.readlink(f"/proc/self/fd/{number}") for number in (file._descriptor, file._io)}
    assert all(name.endswith(" (deleted)") for name in descriptors)
    try:
        raise ValueError("in training")
    except ValueError:
        del file
    deadline = time.monotonic() + 10.0  # the thread may still hold its last job
    while time.monotonic() < deadline:
        gc.collect()
        opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        if not descriptors & {os.readlink(path) for path in opened if os.path.lexists(path)}:
            return
    pytest.fail("the file is still open")
