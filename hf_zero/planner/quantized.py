"""Memory of products with 4-bit and 8-bit weights (bitsandbytes), for tensors without data.

[Note: products] For torch, a product with quantized weights is a single operation. Its kernel dequantizes the weight
to the dtype of the product, which is its largest allocation, so the meter executes such operations in parts. GPU
kernels for few rows do not dequantize the full weight; in backward all kernels do.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_zero.compat import replaced


@contextmanager
def device_products(on_cpu: bool) -> Iterator[None]:
    """Makes bitsandbytes choose the same implementation for tensors without data as on the device. On CPUs, 8-bit
    weights are dequantized to floating point."""
    if not on_cpu or "bitsandbytes.autograd" not in sys.modules:
        yield
        return
    from bitsandbytes.autograd import _functions

    with replaced(_functions, MatMul8bitLt=_functions.MatMul8bitFp):
        yield


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


def _int8_vectorwise_quant(left: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Assumes that there are no outliers."""
    rows = torch.empty_like(left, dtype=torch.int8)
    scales = torch.empty(left.numel() // left.shape[-1], dtype=torch.float32, device=left.device)
    if not threshold:
        return rows, scales, None
    left.abs() >= threshold  # noqa: B015 - the memory of the search for outliers
    return rows, scales, torch.empty(0, dtype=torch.long, device=left.device)


def _int8_mixed_scaled_mm(
    left: Tensor,
    left_rows: Tensor,
    weight: Tensor,
    left_scales: Tensor,
    scales: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    sums = torch.empty(*left_rows.shape[:-1], weight.shape[0], dtype=torch.int32, device=left.device)
    product = torch.empty_like(sums, dtype=torch.float16)
    return product.to(left.dtype), left.new_empty(0)


# By name, because bitsandbytes need not be installed.
PRODUCTS: dict[str, Callable] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
}
