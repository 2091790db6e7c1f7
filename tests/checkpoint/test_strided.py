import itertools

import pytest
import torch

from hf_zero.checkpoint.strided import Copy, Dim, Unaligned, compose, merged, within
from hf_zero.checkpoint.trace import Trace
from hf_zero.checkpoint.transfer import incoming, outgoing


pytestmark = pytest.mark.quick


def elements(copy: Copy) -> dict[int, int]:
    """Every element written, and the one read for it."""
    steps = itertools.product(*(range(dim.size) for dim in copy.dims))
    return {
        copy.target + sum(i * dim.target for i, dim in zip(step, copy.dims)): copy.source
        + sum(i * dim.source for i, dim in zip(step, copy.dims))
        for step in steps
    }


TRANSPOSE = Copy("x", 0, 0, merged([Dim(4, 6, 1), Dim(6, 1, 4)]))


def test_loops_that_continue_one_another_are_merged():
    assert merged([Dim(2, 12, 12), Dim(3, 4, 4), Dim(4, 1, 1), Dim(1, 7, 7)]) == (Dim(24, 1, 1),)
    assert merged([Dim(4, 6, 1), Dim(6, 1, 4)]) == (Dim(6, 1, 4), Dim(4, 6, 1))


def test_a_copy_of_a_copy_is_one_copy():
    back = Copy("y", 0, 0, merged([Dim(6, 4, 1), Dim(4, 1, 6)]))
    assert compose(TRANSPOSE, back) == Copy("x", 0, 0, (Dim(24, 1, 1),))
    rows_2_and_3 = Copy("y", 8, 0, (Dim(8, 1, 1),))
    assert elements(compose(TRANSPOSE, rows_2_and_3)) == {i: elements(TRANSPOSE)[i + 8] for i in range(8)}
    assert compose(TRANSPOSE, Copy("y", 24, 0, (Dim(4, 1, 1),))) is None


def test_what_is_no_rectangle_is_refused():
    with pytest.raises(Unaligned):
        compose(TRANSPOSE, Copy("y", 0, 0, (Dim(2, 5, 1),)))
    with pytest.raises(Unaligned):
        compose(TRANSPOSE, Copy("y", 2, 0, (Dim(8, 1, 1),)))  # from the middle of a row to that of another
    with pytest.raises(Unaligned):
        list(within(Copy("x", 0, 0, (Dim(3, 1, 3), Dim(3, 2, 1))), 0, 9))  # overlaps itself


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6), (4, 8, 1), (3, 6, 1)])
def test_every_range_of_the_source_gives_its_elements(strides):
    sizes = (2, 3, 4) if strides != (3, 6, 1) else (2, 4, 3)
    copy = Copy("x", 5, 7, tuple(Dim(*loop) for loop in zip(sizes, strides, (12, sizes[2], 1))))
    whole = elements(copy)
    for start in range(0, 32):
        for stop in range(start, 32):
            found = [elements(part) for part in within(copy, start, stop)]
            assert {key: value for part in found for key, value in part.items()} == {
                key: value for key, value in whole.items() if start <= value < stop
            }
            assert sum(map(len, found)) == sum(start <= value < stop for value in whole.values())


def converted(x, y):
    """Everything that conversions do: stack, cat, chunk, split, transpose, permute, reshape, squeeze."""
    heads = y.view(3, 4, 2, 8).transpose(1, 2).reshape(24, 8)
    stacked = torch.stack([piece.squeeze(0) for piece in x.chunk(4, dim=0)], dim=0)
    both = torch.cat([stacked, stacked.flip(1)[:, :0], stacked.transpose(1, 2).contiguous().transpose(1, 2)], dim=1)
    first, second = both.transpose(1, 2).contiguous().split([5, 7], dim=2)
    return [heads, stacked, both, first.contiguous(), second.reshape(-1), torch.cat(heads.unbind(0)[3:9])]


def test_traced_copies_make_the_tensor_that_the_operations_make(monkeypatch):
    monkeypatch.setattr("hf_zero.checkpoint.transfer.PIECE_NUMEL", 7)
    real = {"x": torch.randn(4, 6, 5), "y": torch.randn(24, 8)}
    trace = Trace()
    with trace:
        results = converted(trace.new("x", (4, 6, 5), torch.float32), trace.new("y", (24, 8), torch.float32))
    for meta, wanted in zip(results, converted(**real), strict=True):
        copies = trace.copies_of(meta)
        for num_ranks in (1, 3):
            check_transfers(copies, real, wanted, num_ranks)


def check_transfers(copies, real, wanted, num_ranks):
    out = torch.full_like(wanted, float("nan")).reshape(-1)
    back = {name: torch.full((tensor.numel(),), float("nan")) for name, tensor in real.items()}
    for copy in copies:
        flat = real[copy.name].reshape(-1)
        for rank in range(num_ranks):
            start, stop = rank * len(flat) // num_ranks, (rank + 1) * len(flat) // num_ranks
            for first, values in outgoing(copy, start, flat[start:stop]):
                out[first : first + len(values)] = values
    assert torch.equal(out, wanted.reshape(-1))

    def read(name, first, target):
        target.copy_(out[first : first + len(target)])

    for copy in copies:
        flat = back[copy.name]
        for rank in range(num_ranks):
            start, stop = rank * len(flat) // num_ranks, (rank + 1) * len(flat) // num_ranks
            incoming([copy], start, flat[start:stop], read)
    for name, tensor in real.items():
        taken = ~back[name].isnan()
        assert torch.equal(back[name][taken], tensor.reshape(-1)[taken])


def test_values_are_rounded_on_the_way():
    out = torch.zeros(24)
    values = torch.randn(24)
    incoming(
        [TRANSPOSE], 0, out, lambda name, first, t: t.copy_(values[first : first + len(t)]), through=torch.bfloat16
    )
    assert torch.equal(out.view(4, 6), values.view(6, 4).t().bfloat16().float())


def test_what_is_computed_is_done_again_on_values():
    trace = Trace()
    with trace:
        meta = trace.new("x", (3, 4), torch.float32)
        shifted = meta.t().contiguous()
        shifted.add_(1.0)
        result = shifted[1:] * 2
    with pytest.raises(Unaligned):
        trace.copies_of(result)
    x = torch.randn(3, 4)
    assert trace.sources_of(result) == ["x"]
    assert torch.equal(trace.values_of(result, {"x": x.reshape(-1).clone()}), (x.t() + 1)[1:] * 2)
