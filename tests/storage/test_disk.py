"""Tensors that rest in a file and come into memory a few at a time."""

import mmap

import pytest
import torch

from hf_zero.comm import Comm, Pending
from hf_zero.storage import DiskBuffers, DiskTensor, Extent, SwapFile, disk, windows


class Memory:
    """Makes buffers, and counts their bytes."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class Log:
    """A swap file that does nothing, and tells who asked it for what, and waited for it, in which order."""

    def __init__(self):
        self.events: list[str] = []
        self.readers: set = set()

    def _move(self, way: str, offset: int) -> Pending:
        name = "abcdef"[offset // 4096]
        self.events.append(f"{way} {name}")
        return Pending(lambda: self.events.append(f"{way} {name} over"))

    def read(self, offset, memory):
        return self._move("read", offset)

    def write(self, offset, memory):
        return self._move("write", offset)


@pytest.fixture
def comm():
    return Comm(torch.device("cpu"), 60.0)


@pytest.fixture
def memory():
    return Memory()


def extents_of(disk_: DiskBuffers, comm: Comm, parts: list) -> list[Extent]:
    return [tensor.extent for tensor in disk_.tensors(comm, parts)]


def settle(disk_: DiskBuffers) -> None:
    """Waits until all that was released is written."""
    while disk_._released:
        disk_._wait_for_oldest()


def make_records(disk_: DiskBuffers, comm: Comm, numels: list[int]) -> list:
    """For each size an fp32 and a bf16 tensor, in windows."""
    parts = [(numel, dtype) for numel in numels for dtype in (torch.float32, torch.bfloat16)]
    extents = extents_of(disk_, comm, parts)
    pairs = zip(extents[::2], extents[1::2])
    return [tuple(e.window(*w) for e in pair) for pair in pairs for w in windows(pair[0].numel)]


@pytest.mark.quick
def test_tensors_of_any_size_keep_their_values_in_buffers_that_do_not_grow_with_their_number(
    tmp_path, monkeypatch, comm, memory
):
    monkeypatch.setattr(disk, "WINDOW_NUMEL", 4096)
    shelf = DiskBuffers(SwapFile.open(comm, tmp_path), memory)
    records = make_records(shelf, comm, [1, 1023, 4096, 4097, 20000, 3] * 5)
    assert len(records) == (1 + 1 + 1 + 2 + 5 + 1) * 5
    for factor in (1, 2):  # written, then changed
        for number, (whole, half) in enumerate(shelf.walk(records, writes=True)):
            assert (whole == (factor - 1) * number).all() and (half == (factor - 1) * (number % 100)).all()
            whole.fill_(factor * number)
            half.fill_(factor * (number % 100))
    for number, (whole, _) in enumerate(shelf.walk(records, writes=False)):
        assert (whole == 2 * number).all()
        whole.fill_(-1)  # not written back
    for number, (whole, half) in zip(reversed(range(len(records))), shelf.walk(records[::-1], writes=False)):
        assert (whole == 2 * number).all() and (half == 2 * (number % 100)).all()
    settle(shelf)
    # one buffer each for what is used, read and written; the first, made for a small record, is made again
    assert max(memory.sizes) == 4096 * (4 + 2) and len(memory.sizes) <= 3 + 3
    assert shelf._num_buffers == 3


def test_the_next_record_is_read_and_the_last_written_while_one_is_used(memory):
    log = Log()
    shelf = DiskBuffers(log, memory)
    records = [(Extent(4096 * index, 1024, torch.float32),) for index in range(4)]
    for record, _ in zip(records, shelf.walk(records, writes=True)):
        log.events.append(f"use {'abcd'[record[0].offset // 4096]}")
    settle(shelf)
    assert log.events == [
        "read a", "read a over", "read b", "use a",
        "write a", "read b over", "read c", "use b",  # a third buffer: nobody has waited for a
        "write b", "read c over", "write a over", "read d", "use c",
        "write c", "read d over", "use d", "write d",
        "write b over", "write c over", "write d over",
    ]  # fmt: skip


def test_what_was_read_ahead_is_read_again_when_it_may_have_been_written(tmp_path, comm, memory):
    shelf = DiskBuffers(SwapFile.open(comm, tmp_path), memory)
    one, two = extents_of(shelf, comm, [(1000, torch.float32), (1000, torch.float32)])
    shelf.prefetch((one,))
    for tensors in shelf.walk([(one, two)], writes=True):
        shelf.prefetch((one,))  # left out: it is in use
        for tensor in tensors:
            tensor.fill_(7)
    for (tensor,) in shelf.walk([(one,)], writes=False):
        assert (tensor == 7).all()


def test_what_one_reads_ahead_is_read_again_when_another_has_written_it(tmp_path, comm, memory):
    """As parameters are, which one thread gathers and another updates."""
    writer = DiskBuffers(SwapFile.open(comm, tmp_path), memory)
    reader = DiskBuffers(writer.file, memory)
    extent, other = extents_of(writer, comm, [(5000, torch.bfloat16), (5000, torch.bfloat16)])
    for tensor, is_ahead in ((DiskTensor(writer, other), True), (DiskTensor(writer, extent), False)):
        reader.prefetch((extent,))
        tensor.write(0, torch.full((5000,), 3.0))
        assert reader._is_ahead((extent,)) is is_ahead
        for (found,) in reader.walk([(extent,)], writes=False):
            assert (found == (0 if is_ahead else 3)).all()


def test_a_buffer_is_not_filled_again_before_its_last_use_is_over(tmp_path, comm, memory):
    shelf = DiskBuffers(SwapFile.open(comm, tmp_path), memory)
    record, *others = [(extent,) for extent in extents_of(shelf, comm, [(1024, torch.float32)] * 5)]
    seen = []
    lent = shelf.load(record)[0].fill_(5)
    shelf.release(record, writes=False, uses=[Pending(lambda: seen.append(lent.clone()))])
    for _ in shelf.walk(others, writes=False):
        pass
    assert (seen[0] == 5).all()


@pytest.mark.quick
def test_an_exception_in_the_middle_leaves_everything_usable(tmp_path, comm, memory):
    shelf = DiskBuffers(SwapFile.open(comm, tmp_path), memory)
    records = [(extent,) for extent in extents_of(shelf, comm, [(1024, torch.float32)] * 6)]
    for _ in range(4):
        with pytest.raises(ValueError, match="in training"):
            for number, (tensor,) in enumerate(shelf.walk(records, writes=True)):
                tensor.fill_(number)
                if number == 2:
                    raise ValueError("in training")
    values = [float(tensor[0]) for (tensor,) in shelf.walk(records, writes=False)]
    assert values == [0, 1, 2, 0, 0, 0] and len(memory.sizes) == 3
