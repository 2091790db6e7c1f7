"""What a rank does to know the others costs about as much Python however many they are, and few messages."""

import operator
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import Comm, connect, distributed
from hf_zero.comm import ranks as comm_ranks
from tests.distributed import ranks


pytestmark = pytest.mark.quick


def num_calls(act: Callable[[], object]) -> int:
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
        connecting = num_calls(lambda: comms.append(connect(comm_ranks.CPU, bucket_nbytes="auto")))
        found: list = []
        exchanging = num_calls(lambda: found.extend(comms[0].all_gather_object({"a": [1]})))
        assert found == [{"a": [1]}] * num_ranks
        rows = comms[0].all_gather_vector(torch.tensor([1, 2]))
        assert rows.shape == (num_ranks, 2) and rows.unique(dim=0).tolist() == [[1, 2]]
        assert len(set(comm_ranks.hosts(dist.group.WORLD))) == 1
        assert f"rank {num_ranks - 1} (" in comm_ranks.name_of(dist.group.WORLD, num_ranks - 1)
        return connecting, exchanging, comms[0]
    finally:
        dist.destroy_process_group()


def test_connecting_and_agreeing_take_as_many_calls_with_4096_ranks_as_with_8(monkeypatch):
    _started(2, monkeypatch)  # what is imported or made once for the process
    few, many = (_started(num_ranks, monkeypatch)[:2] for num_ranks in (8, 4096))
    for name, of_few, of_many in zip(("connecting", "an exchange of objects"), few, many, strict=True):
        assert of_many < 1.1 * of_few + 50, f"{name}: {of_few} calls with 8 ranks, {of_many} with 4096"


@pytest.mark.parametrize("most_paired, num_messages", [(3, 8), (2, 0)])
@ranks(3)
def test_ranks_send_messages_in_pairs_only_where_they_are_few(most_paired, num_messages):
    """Sizes and texts of objects of unlike lengths, numbers, and a barrier."""
    assert distributed.MAX_PAIRED_RANKS == 32
    comm = connect(comm_ranks.CPU, group=dist.new_group(), bucket_nbytes=2**20, shared_memory=False)
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
        patch.setattr(distributed, "MAX_PAIRED_RANKS", most_paired)
        assert comm.all_gather_object("x" * comm.rank) == ["", "x", "xx"]
        assert comm.all_gather_vector(torch.tensor([comm.rank, -comm.rank])).tolist() == [[0, 0], [1, -1], [2, -2]]
        comm.barrier()
    assert isend.call_count == num_messages
