import pytest
import torch

from hf_zero.checkpoint import trace as room
from hf_zero.checkpoint.trace import Run, Trace, within


pytestmark = pytest.mark.quick


def test_every_range_of_the_target_has_its_parts_of_runs():
    runs = [Run("x", 10, 0, 3), Run("y", 0, 3, 1), Run("x", 4, 6, 2)]  # nothing is copied to 4 and 5
    wanted = {0: ("x", 10), 1: ("x", 11), 2: ("x", 12), 3: ("y", 0), 6: ("x", 4), 7: ("x", 5)}
    for start in range(9):
        for stop in range(start, 10):
            found = [
                (part.target + i, (part.name, part.source + i))
                for part in within(runs, start, stop)
                for i in range(part.numel)
            ]
            assert found == [(at, wanted[at]) for at in range(start, stop) if at in wanted]


def converted(x, y):
    """Everything that conversions do: stack, cat, chunk, split, transpose, permute, reshape, squeeze."""
    heads = y.view(3, 4, 2, 8).transpose(1, 2).reshape(24, 8)
    stacked = torch.stack([piece.squeeze(0) for piece in x.chunk(4, dim=0)], dim=0)
    both = torch.cat([stacked, stacked.flip(1)[:, :0], stacked.transpose(1, 2).contiguous().transpose(1, 2)], dim=1)
    first, second = both.transpose(1, 2).contiguous().split([5, 7], dim=2)
    return [heads, stacked, both, first.contiguous(), second.reshape(-1), torch.cat(heads.unbind(0)[3:9])]


def test_traced_runs_make_the_tensor_that_the_operations_make():
    real = {"x": torch.randn(4, 6, 5), "y": torch.randn(24, 8)}
    trace = Trace()
    with trace:
        results = converted(trace.new("x", (4, 6, 5), torch.float32), trace.new("y", (24, 8), torch.float32))
    for meta, wanted in zip(results, converted(**real), strict=True):
        out = torch.full((wanted.numel(),), float("nan"))
        for name, source, target, numel in trace.runs_of(meta):
            out[target : target + numel] = real[name].reshape(-1)[source : source + numel]
        assert torch.equal(out, wanted.reshape(-1))


def test_runs_that_continue_one_another_are_one():
    trace = Trace()
    with trace:
        x = trace.new("x", (4, 6), torch.float32)
        again = torch.cat([x[:2].clone(), x[2:]]).t().contiguous().t().contiguous()
        experts = torch.stack([trace.new("a", (3, 2), torch.float32), trace.new("b", (3, 2), torch.float32)])
    assert trace.runs_of(again) == [Run("x", 0, 0, 24)]
    assert trace.runs_of(experts) == [Run("a", 0, 0, 6), Run("b", 0, 6, 6)]


def test_what_is_computed_is_done_again_on_values():
    trace = Trace()
    with trace:
        meta = trace.new("x", (3, 4), torch.float32)
        shifted = meta.t().contiguous()
        shifted.add_(1.0)
        result = shifted[1:] * 2
    assert trace.runs_of(result) is None
    x = torch.randn(3, 4)
    found = trace.computation_of(result)
    assert list(found.sources) == ["x"]
    assert torch.equal(found.of({"x": x.reshape(-1).clone()}), ((x.t() + 1)[1:] * 2).reshape(-1))


@pytest.mark.parametrize(
    ("convert", "num_parts"),
    [
        (lambda x: x.transpose(1, 2).contiguous(), 5),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 3:]], dim=2).transpose(1, 2).contiguous(), 5),
        (lambda x: x.permute(0, 2, 1).clone()[:, 1:].transpose(1, 2).contiguous(), 5),
        (lambda x: x.flip(0).transpose(1, 2).contiguous(), 1),
        (lambda x: x.permute(2, 1, 0).contiguous(), 1),
        (lambda x: torch.cat([x[1:], x[:1]]).transpose(1, 2).contiguous(), 1),
        (lambda x: (x + x.mean(0)).transpose(1, 2).contiguous(), 1),
    ],
)
def test_parts_are_made_of_the_same_parts_alone(convert, num_parts):
    x, trace = torch.randn(5, 4, 6), Trace()
    with trace:
        meta = convert(trace.new("x", (5, 4, 6), torch.float32))
    found = trace.computation_of(meta)
    assert found.num_parts == num_parts
    wanted, flat, read = convert(x).reshape(-1), x.reshape(-1), []

    def read_range(name: str, start: int, out: torch.Tensor) -> None:
        read.append(out.numel())
        out.copy_(flat[start : start + out.numel()])

    for start, stop in [(0, wanted.numel()), (7, 9), (wanted.numel() // 5 - 1, wanted.numel() // 5 + 1)]:
        out = torch.full((stop - start,), float("nan"))
        for first, values in found.read(read_range, start, stop):
            out[first - start :][: values.numel()] = values
        assert torch.equal(out, wanted[start:stop])
    assert max(read) == flat.numel() // num_parts


def test_what_is_made_of_too_many_runs_is_done_again_on_values(monkeypatch):
    monkeypatch.setattr(room, "MAX_RUNS", 11)
    trace = Trace()
    with trace:
        result = trace.new("x", (3, 4), torch.float32).t().contiguous()
    assert trace.runs_of(result) is None
    x = torch.randn(3, 4)
    assert torch.equal(trace.computation_of(result).of({"x": x.reshape(-1)}), x.t().reshape(-1))


def test_a_tensor_that_another_thread_makes_meanwhile_takes_no_operation_away():
    """transformers reads tensors in threads: what they are made of is then traced while others are made."""
    empty, made = torch.empty, []

    def interrupted(*args, **kwargs):
        made.append(first + 1)
        return empty(*args, **kwargs)

    with Trace() as trace:
        first = trace.new("first", (3,), torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", interrupted)
            second = trace.new("second", (3,), torch.float32)
        computation = trace.computation_of(torch.cat([made[0], second]))
    values = {"first": torch.arange(3.0), "second": torch.arange(3.0)}
    assert computation.of(values).tolist() == [1, 2, 3, 0, 1, 2]
