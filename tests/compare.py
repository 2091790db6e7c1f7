"""Comparisons of the results of two trainings: dataclasses of numbers, and of weights by name."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name."""
    with hf_zero.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _pairs(a, b, what: str) -> Iterator[tuple[str, bool, Tensor, Tensor]]:
    """Yields names, whether they are those of weights, and values."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, dict):
            assert x.keys() == y.keys(), what
            yield from ((name, True, x[name], y[name]) for name in x)
        else:
            numbers = (torch.as_tensor(values, dtype=torch.float64) for values in (x, y))
            yield field.name, False, *numbers


def assert_equal(a, b, what: str) -> None:
    """Asserts that two results are bit-identical."""
    for name, is_weight, x, y in _pairs(a, b, what):
        assert torch.equal(x, y), f"{what}: {name} {_difference(is_weight, x, y)}"


def assert_close(a, b, what: str, *, loss=1e-6, norm=1e-6, weight=1e-5, atol=0.0) -> None:
    """Asserts that results agree within relative errors. The error of a weight is relative to its largest element.

    Args:
        loss (`float`): error allowed for all numbers but `norms`.
        atol (`float`): absolute error allowed for a weight; the caller derives it.
    """
    for name, is_weight, x, y in _pairs(a, b, what):
        assert x.shape == y.shape, f"{what}: {name} is {tuple(x.shape)}, wanted {tuple(y.shape)}"
        if is_weight:
            bound = (atol + weight * y.abs().max().item()) if y.numel() else 0.0
            is_close = not y.numel() or (x - y).abs().max().item() <= bound
        else:
            bound = norm if name == "norms" else loss
            is_close = bool(((x - y).abs() <= bound * y.abs()).all())
        assert is_close, f"{what}: {name} {_difference(is_weight, x, y)}, bound {bound:.2e}"


def _difference(is_weight: bool, x: Tensor, y: Tensor) -> str:
    return f"differs by {(x - y).abs().max():.2e}" if is_weight and y.numel() else f"{x.tolist()} and {y.tolist()}"


def assert_equal_on_all_ranks(weights: dict[str, Tensor], what: str) -> None:
    """Asserts that all ranks have bit-identical weights, in fp32."""
    bits = [int(values.view(torch.int32).sum(dtype=torch.int64)) for values in weights.values()]
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, bits)
    assert all(other == bits for other in everyones), what
