"""Buffers that forwards write or replace: each step gives all ranks the values of rank 0, by the same bytes."""

from functools import partial

import pytest
import torch
from torch import nn

from hf_zero.engine import buffers
from tests.loopback import run_loopback


CPU = torch.device("cpu")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(3, dtype=torch.bool))  # others begin behind it, aligned
        self.register_buffer("replaced", torch.zeros(2, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("own", torch.zeros(2), persistent=False)
        self.same = nn.Module()
        self.same.register_buffer("count", self.count)


# What rank 1 has in place of a buffer of which rank 0 has another with ones.
PUT = {
    "of its kind": lambda: torch.full((2, 2), 5.0),
    "transposed": lambda: torch.full((2, 2), 5.0).t(),
    "expanded": lambda: torch.full((2, 1), 5.0).expand(2, 2),
    "made for inference": lambda: torch.inference_mode()(torch.full)((2, 2), 5.0),
    "larger": lambda: torch.full((40, 40), 5.0),
    "of another dtype": lambda: torch.full((2, 2), 5),
    "none": lambda: None,
    "elsewhere": lambda: torch.empty(2, 2, device="meta"),
}


def _shares(put, comm):
    model = Counting()
    buffers.place(model, comm)
    shared = buffers.SharedBuffers(model, comm)
    for _ in range(2):
        model.replaced = torch.ones(2, 2) if comm.rank == 0 else put()
        model.own += comm.rank
        model.first.fill_(comm.rank == 0)
        model.count += 7 - comm.rank
        shared.share()
    return model


@pytest.mark.quick
@pytest.mark.parametrize("large_nbytes", [buffers.LARGE_NBYTES, 8])
@pytest.mark.parametrize("put", PUT)
def test_a_buffer_that_one_rank_replaces_does_not_break_what_ranks_share(put, large_nbytes, monkeypatch):
    monkeypatch.setattr(buffers, "LARGE_NBYTES", large_nbytes)
    first, second = run_loopback(2, partial(_shares, PUT[put]), CPU)
    assert first.replaced.tolist() == torch.ones(2, 2).tolist()
    assert second.first.all() and second.count == first.count == 14 and second.same.count is second.count
    assert second.own.tolist() == [2.0, 2.0]
    if put in ("of its kind", "transposed", "expanded", "made for inference"):
        assert torch.equal(second.replaced, first.replaced)
    elif (wanted := PUT[put]()) is not None:
        assert second.replaced.shape == wanted.shape and second.replaced.dtype == wanted.dtype


# What a forward gives a buffer of four elements as its data, or makes of it.
DATA = {
    "larger": lambda buffer: setattr(buffer, "data", torch.full((3, 2), 5.0)),
    "one element": lambda buffer: setattr(buffer, "data", torch.full((1,), 5.0)),
    "resized": lambda buffer: buffer.resize_(40),
}


def _reshapes(give, ranks, comm):
    model = Counting()
    buffers.place(model, comm)
    shared = buffers.SharedBuffers(model, comm)
    for _ in range(2):
        if comm.rank in ranks:
            give(model.replaced)
        model.count += 7 - comm.rank
        shared.share()
    model.replaced.data = torch.full((2, 2), float(comm.rank))  # of the kind that was noted
    shared.share()
    return model.count, model.replaced


@pytest.mark.quick
@pytest.mark.parametrize("large_nbytes", [buffers.LARGE_NBYTES, 8])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("give", DATA)
def test_a_buffer_whose_data_changes_its_shape_does_not_break_what_ranks_share(give, ranks, large_nbytes, monkeypatch):
    monkeypatch.setattr(buffers, "LARGE_NBYTES", large_nbytes)
    for count, replaced in run_loopback(2, partial(_reshapes, DATA[give], ranks), CPU):
        assert count == 14 and replaced.tolist() == torch.zeros(2, 2).tolist()
