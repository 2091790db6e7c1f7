"""How much work an operation is: the FLOPs of a matrix product, the bytes that any other operation moves."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


_aten = torch.ops.aten


def _attention(query: Tensor, key: Tensor, *_) -> int:
    """Scores and values: two products, each of all queries with all keys."""
    return 4 * query.numel() * key.shape[-2]


def _attention_backward(_, query: Tensor, key: Tensor, *__) -> int:
    return 2 * _attention(query, key)


def _grouped_mm(left: Tensor, right: Tensor, *_) -> int:
    """Each row of `left` meets the matrix of its group; where both are matrices, groups are columns and rows."""
    return 2 * left.numel() * right.shape[-1]


_FLOPS: dict[Callable, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped_mm,
    _aten.addmm_: lambda _, left, right, *__: 2 * left.numel() * right.shape[-1],
}


def work_of(func, args: tuple, kwargs: dict, result) -> tuple[int, int]:
    """Returns the FLOPs and the bytes of an operation; one of the two is 0.

    Args:
        func: the operation, as a dispatch mode is given it.
        args (`tuple`): its arguments.
        kwargs (`dict`): likewise.
        result: what it has returned.
    """
    formula = _FLOPS.get(func.overloadpacket)
    if formula is not None:
        return formula(*args), 0
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result)), 0
    return (0, 0) if _moves_nothing(func) else (0, _nbytes(args) + _nbytes(result))


@cache
def _moves_nothing(func) -> bool:
    """Whether an operation makes a view, or memory that nobody has written to."""
    schema = func._schema
    is_view = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
    return is_view or schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach"))


def _nbytes(value) -> int:
    if isinstance(value, Tensor):
        # of what is expanded, one copy is read
        return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(each) for each in value)
    return 0
