"""Operations on the meta device: their results, and the work that they would be on a device.

[Note: caching] Except for views and in-place operations, both depend only on shapes, strides, dtypes and the default
dtype. Torch computes many results in Python, and identical blocks, their recomputation, steps and engines repeat the
same operations. Results are therefore cached, and their tensors created directly.

[Note: products] For torch, a product with 4-bit weights (bitsandbytes) is a single operation. Its kernel dequantizes
the weight to the dtype of the product, which is its largest allocation, so the meter executes such operations in
parts. GPU kernels for few rows do not dequantize the full weight; in backward all kernels do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry


_aten = torch.ops.aten
_META, _HOST = torch.device("meta"), torch.device("cpu")
# The FLOPs of a matrix product and the bytes that any other operation moves. One of them is 0.
Amount = tuple[int, int]


def _yes(*_, **__) -> bool:
    """The assumption that masks hide nothing and that sequences are not packed."""
    return True


def _ones(tensor: Tensor, *, dtype: torch.dtype | None = None, **_) -> Tensor:
    return torch.ones(tensor.shape, dtype=dtype or tensor.dtype)


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.long, device=tensor.device)


def _index(func: Callable, tensor: Tensor, indices: list[Tensor | None], *rest, **kwargs) -> Tensor:
    """Indexes as if masks selected everything."""
    chosen: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool
        chosen += _nonzero(index).unbind(1) if is_mask else [index]
    return func(tensor, chosen, *rest, **kwargs)


def _grouped_mm(func: Callable, left: Tensor, right: Tensor, *rest, **kwargs) -> Tensor:
    """Computes grouped products on the meta device, where torch supports only bf16."""
    dtype, half = left.dtype, torch.bfloat16
    return func(left.to(half), right.to(half), *rest, **kwargs).to(dtype)


# Operations that depend on values, and their replacements.
_ASSUMED = {
    _aten._local_scalar_dense.default: _yes,
    _aten.is_nonzero.default: _yes,
    _aten.equal.default: _yes,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: partial(_index, _aten.index.Tensor),
    _aten.index_put.default: partial(_index, _aten.index_put.default),
    _aten.index_put_.default: partial(_index, _aten.index_put_.default),
    _aten._grouped_mm.default: partial(_grouped_mm, _aten._grouped_mm.default),
}


def _gemm_4bit(
    left: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    if absmax_8bit is not None:
        _ = torch.empty_like(absmax_8bit, dtype=torch.float32) + absmax_offset  # the scales of the blocks
    weight = torch.empty(shape, dtype=left.dtype, device=left.device)
    return F.linear(left, weight, bias)


def _attention(query: Tensor, key: Tensor, *_) -> int:
    """Scores and values: two products of all queries with all keys."""
    return 4 * query.numel() * key.shape[-2]


def _attention_backward(_, query: Tensor, key: Tensor, *__) -> int:
    return 2 * _attention(query, key)


def _grouped_flops(left: Tensor, right: Tensor, *_) -> int:
    """Each row of `left` is multiplied by the matrix of its group. If both are matrices, groups are ranges of columns
    and rows."""
    return 2 * left.numel() * right.shape[-1]


_FLOPS: dict[Callable, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped_flops,
    _aten.addmm_: lambda _, left, right, *__: 2 * left.numel() * right.shape[-1],
}


@dataclass(frozen=True)
class _Found:
    """A cached result: the shape, strides and dtype of each tensor."""

    made: list[tuple[Any, Any, torch.dtype]]
    is_tuple: bool
    amount: Amount

    def make(self) -> Any:
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device=_META) for shape, strides, dtype in self.made
        ]
        return tuple(tensors) if self.is_tuple else tensors[0]


class MetaOperation:
    """An operator that a dispatch mode intercepts. `run` returns its result and its amount of work."""

    def __init__(self, func: Any):
        # by name, because bitsandbytes need not be installed
        self.product = _gemm_4bit if func.name() == "bitsandbytes::gemm_4bit" else None
        self._func = func
        self._assumed = _ASSUMED.get(func)
        self._is_copy = func is _aten._to_copy.default
        schema, packet = func._schema, func.overloadpacket
        self._own_formula, self._formula = _FLOPS.get(packet), flop_registry.get(packet)
        gives_alias = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
        # a view, or uninitialized memory
        self._moves_nothing = gives_alias or schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach"))
        makes_tensors = schema.name.startswith("aten::") and not (schema.is_mutable or gives_alias)
        self._may_be_known = makes_tensors and self._assumed is None
        self._known: dict[tuple, _Found | None] = {}  # by arguments; None if the result depends on more than these

    def run(self, args: tuple, kwargs: dict, *, measures: bool) -> tuple[Any, Amount | None]:
        """Returns the result for these arguments, and the amount of work if `measures`."""
        func = self._func
        if self._assumed is not None and args[0].is_meta:
            func = self._assumed
        elif self._is_copy and kwargs.get("device") == _HOST and args[0].is_meta:
            func = _ones
        elif self._may_be_known and (key := _key_of(args, kwargs)) is not None:
            found = self._known.get(key)
            if found is not None:
                return found.make(), found.amount
            if key not in self._known:
                result = func(*args, **kwargs)
                self._known[key] = self._found(args, kwargs, result)
                return result, self._amount(args, kwargs, result) if measures else None
        result = func(*args, **kwargs)
        return result, self._amount(args, kwargs, result) if measures else None

    def _amount(self, args: tuple, kwargs: dict, result: Any) -> Amount:
        if self._own_formula is not None:
            return self._own_formula(*args), 0
        if self._formula is not None:
            return int(self._formula(*args, **kwargs, out_val=result)), 0
        return 0, 0 if self._moves_nothing else _nbytes(args) + _nbytes(result)

    def _found(self, args: tuple, kwargs: dict, result: Any) -> _Found | None:
        """Returns the cacheable form of a result, or `None` if it is not made of new tensors with separate memory, or
        if the amount of work depends on the memory of the arguments."""
        made = list(result) if isinstance(result, tuple) else [result]
        given = [*_tensors_in(args), *_tensors_in(tuple(kwargs.values()))]
        if not all(isinstance(each, Tensor) and each.is_meta and each.layout is torch.strided for each in made):
            return None
        memory = {each.untyped_storage()._cdata for each in made}
        is_new = len(memory) == len(made) and memory.isdisjoint(each.untyped_storage()._cdata for each in given)
        is_whole = all(
            each.storage_offset() == 0 and each.untyped_storage().nbytes() == _span_nbytes(each) for each in made
        )
        if not (is_new and is_whole and all(each.nbytes <= _span_nbytes(each) for each in given)):
            return None
        traits = [(each.shape, each.stride(), each.dtype) for each in made]
        return _Found(traits, isinstance(result, tuple), self._amount(args, kwargs, result))


operation_of = cache(MetaOperation)


class _NotOfShapes(Exception):
    """An argument is neither a number nor a plain meta tensor."""


def _key_of(args: tuple, kwargs: dict) -> tuple | None:
    """Returns everything that determines the result, or `None` if values may."""
    try:
        # the default dtype applies to tensors created without a dtype and to quotients of integers
        key = _traits(args), _traits(tuple(kwargs.items())) if kwargs else (), torch.get_default_dtype()
        hash(key)
    except (_NotOfShapes, TypeError):
        return None
    return key


def _traits(values: Any) -> tuple:
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta or value.layout is not torch.strided:
                raise _NotOfShapes
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            found.append(_traits(value))
        else:
            found.append((type(value), value))  # 1, 1.0 and True are equal but lead to different dtypes
    return tuple(found)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors_in(part)] if isinstance(value, (list, tuple)) else []


def _span_nbytes(tensor: Tensor) -> int:
    """Returns the number of bytes from the first element of a tensor to the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        # expanded tensors are read once
        return min(value.nbytes, value.untyped_storage().nbytes())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(each) for each in value)
    return 0
