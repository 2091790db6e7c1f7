"""What a rank does to know the others costs about as much Python however many they are, and few messages."""

import operator
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import Comm, connect, distributed, ranks
from tests.distributed import run_ranks


pytestmark = pytest.mark.quick


def _num_calls(act: Callable[[], object]) -> int:
    """Counts the functions of Python and C that are called, except `operator.index`: torch 2.14 calls it in
    `new_group` for every rank."""
    count = 0

    def counted(_, event: str, function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and function is not operator.index

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def _started(num_ranks: int, monkeypatch) -> tuple[int, int, Comm]:
    """Returns the calls of connecting so many ranks, those of an exchange of objects, and this rank's collectives. The
    others send what it sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=num_ranks // 2, world_size=num_ranks)
    try:
        comms: list[Comm] = []
        connecting = _num_calls(lambda: comms.append(connect(ranks.CPU, bucket_nbytes="auto")))
        found: list = []
        exchanging = _num_calls(lambda: found.extend(comms[0].all_gather_object({"a": [1]})))
        assert found == [{"a": [1]}] * num_ranks
        rows = comms[0].all_gather_vector(torch.tensor([1, 2]))
        assert rows.shape == (num_ranks, 2) and rows.unique(dim=0).tolist() == [[1, 2]]
        assert len(set(ranks.hosts(dist.group.WORLD))) == 1
        assert f"rank {num_ranks - 1} (" in ranks.name_of(dist.group.WORLD, num_ranks - 1)
        return connecting, exchanging, comms[0]
    finally:
        dist.destroy_process_group()


def test_connecting_and_agreeing_take_as_many_calls_with_4096_ranks_as_with_8(monkeypatch):
    _started(2, monkeypatch)  # what is imported or made once for the process
    few, many = (_started(num_ranks, monkeypatch)[:2] for num_ranks in (8, 4096))
    for name, of_few, of_many in zip(("connecting", "an exchange of objects"), few, many, strict=True):
        assert of_many < 1.1 * of_few + 50, f"{name}: {of_few} calls with 8 ranks, {of_many} with 4096"


def _exchanged(most_paired: int) -> tuple[list, list[list[int]], int]:
    """Returns an exchange of objects of unlike lengths, one of numbers, and how many messages this rank has sent."""
    comm = connect(ranks.CPU, group=dist.new_group(), bucket_nbytes=2**20, shared_memory=False)
    sent = 0

    def counted(*args, **settings) -> dist.Work:
        nonlocal sent
        sent += 1
        return isend(*args, **settings)

    isend = dist.isend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "MAX_PAIRED_RANKS", most_paired)
        patch.setattr(dist, "isend", counted)
        objects = comm.all_gather_object("x" * comm.rank)
        rows = comm.all_gather_vector(torch.tensor([comm.rank, -comm.rank]))
        comm.barrier()
    return objects, rows.tolist(), sent


def test_ranks_send_messages_in_pairs_only_where_they_are_few():
    assert distributed.MAX_PAIRED_RANKS == 32
    for most_paired, num_messages in ((3, 8), (2, 0)):  # sizes and texts of the objects, numbers, and a barrier
        for objects, rows, sent in run_ranks(_exchanged, 3, most_paired):
            assert objects == ["", "x", "xx"] and rows == [[0, 0], [1, -1], [2, -2]]
            assert sent == num_messages
