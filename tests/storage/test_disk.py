"""Tensors that are stored in a file and loaded into memory a few at a time."""

import mmap

import pytest
import torch

from hf_zero.comm import Comm, Pending
from hf_zero.storage import DiskBuffers, DiskTensor, SwapFile


COMM = Comm(torch.device("cpu"), 60.0)


class Memory:
    """Allocates buffers and records their sizes."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class Log:
    """A swap file that records its calls and waits."""

    def __init__(self):
        self.events: list[str] = []

    def transfer(self, way: str, parts: list) -> Pending:
        event = f"{way.removeprefix('disk ')} {'abcdef'[parts[0][0] // 4096]}"
        self.events.append(event)
        return Pending(lambda: self.events.append(f"{event} over"))


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def buffers(tmp_path, memory):
    return DiskBuffers(SwapFile(COMM, tmp_path), memory)


def records_of(tensors: list[DiskTensor]) -> list:
    return [tuple(tensor.windows) for tensor in tensors]


def test_the_next_record_is_read_and_the_last_written_while_one_is_used(memory):
    log = Log()
    buffers = DiskBuffers(log, memory)
    records = records_of([DiskTensor(buffers, 4096 * index, 1024, torch.float32) for index in range(4)])
    for record, _ in zip(records, buffers.walk(records, writes=True)):
        log.events.append(f"use {'abcd'[record[0].offset // 4096]}")
    assert log.events == [
        "read a", "read a over", "read b", "use a",
        "write a", "read b over", "read c", "use b",  # a third buffer: nobody has waited for a
        "write b", "read c over", "write a over", "read d", "use c",
        "write c", "read d over", "use d", "write d",
    ]  # fmt: skip


def test_a_prefetched_record_is_read_again_if_it_was_written(tmp_path, memory):
    """As parameters are, which one thread gathers and another updates."""
    log, file = Log(), SwapFile(COMM, tmp_path)
    writer, reader = DiskBuffers(file, memory), DiskBuffers(file, memory)
    tensor, other = writer.tensors([(5000, torch.bfloat16)] * 2)
    [record] = records_of([tensor])
    real, file.transfer = file.transfer, lambda way, parts: log.events.append(way) or real(way, parts)
    for written, num_reads in ((other, 1), (tensor, 2)):
        log.events.clear()
        reader.prefetch(record)
        written.write(0, torch.full((5000,), 3.0))
        for (found,) in reader.walk([record], writes=False):
            assert (found == (3 if written is tensor else 0)).all()
        assert log.events.count("disk read") == num_reads


@pytest.mark.quick
def test_an_exception_in_the_middle_leaves_everything_usable(buffers, memory):
    records = records_of(buffers.tensors([(1024, torch.float32)] * 6))
    for _ in range(4):
        with pytest.raises(ValueError, match="in training"):
            for number, (tensor,) in enumerate(buffers.walk(records, writes=True)):
                tensor.fill_(number)
                if number == 2:
                    raise ValueError("in training")
    values = [float(tensor[0]) for (tensor,) in buffers.walk(records, writes=False)]
    assert values == [0, 1, 2, 0, 0, 0] and len(memory.sizes) == 3
