"""Tensors that are stored in a file and loaded into memory a few at a time."""

import mmap

import pytest
import torch

from hf_zero import storage
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


@pytest.mark.quick
def test_tensors_of_any_size_keep_their_values_in_a_few_buffers(monkeypatch, buffers, memory):
    monkeypatch.setattr(storage, "WINDOW_NUMEL", 4096)
    sizes = [1, 1023, 4096, 4097, 20000, 3] * 5
    tensors = buffers.tensors([(numel, dtype) for numel in sizes for dtype in (torch.float32, torch.bfloat16)])
    pairs = zip(tensors[::2], tensors[1::2])
    records = [windows for one, other in pairs for windows in zip(one.windows, other.windows)]
    assert len(records) == (1 + 1 + 1 + 2 + 5 + 1) * 5
    for factor in (1, 2):  # written, then changed
        for number, (whole, half) in enumerate(buffers.walk(records, writes=True)):
            assert (whole == (factor - 1) * number).all() and (half == (factor - 1) * (number % 100)).all()
            whole.fill_(factor * number)
            half.fill_(factor * (number % 100))
    for number, (whole, _) in enumerate(buffers.walk(records, writes=False)):
        assert (whole == 2 * number).all()
        whole.fill_(-1)  # not written back
    for number, (whole, half) in zip(reversed(range(len(records))), buffers.walk(records[::-1], writes=False)):
        assert (whole == 2 * number).all() and (half == 2 * (number % 100)).all()
    # one buffer each for the records in use, being read and being written; small ones are replaced
    assert max(memory.sizes) == 4096 * (4 + 2) and len(memory.sizes) <= 3 + 3


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


def test_a_buffer_is_not_filled_again_before_its_last_use_is_over(buffers):
    record, *others = records_of(buffers.tensors([(1024, torch.float32)] * 5))
    seen, uses = [], []
    for (lent,) in buffers.walk([record], writes=False, uses=uses):
        lent.fill_(5)
        uses.append(Pending(lambda lent=lent: seen.append(lent.clone())))
    for _ in buffers.walk(others, writes=False):
        pass
    assert (seen[0] == 5).all()


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
