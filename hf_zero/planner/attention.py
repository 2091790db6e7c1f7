"""Attention on the meta device takes the memory of the kernel that a device would choose: torch itself would take the
plain formula there, with all its scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


_PLAIN = F.scaled_dot_product_attention
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# The largest head that fused kernels of GPUs take.
MAX_HEAD_NUMEL = 256


@contextmanager
def device_attention(on_cpu: bool) -> Iterator[None]:
    """While it is entered, `scaled_dot_product_attention` of tensors without data takes what it would on a device.

    On CPUs torch is asked which kernel it would choose. On GPUs it is taken to be a fused one where there is one: they
    keep the output and one number for each query, whatever their name.

    Args:
        on_cpu (`bool`): which of the two.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = attn_mask
        if query.is_meta and mask is not None and mask.dtype is torch.bool:  # as torch converts it, for each call
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        is_fused = _is_fused_on_cpu if on_cpu else _is_fused_on_gpu
        if not query.is_meta or not is_fused(query, key, value, mask, dropout_p, is_causal, enable_gqa):
            return _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _FUSED(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]

    # a mode of torch's functions would not be in force in backward, where checkpointed blocks are called again
    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


def _is_fused_on_gpu(query: Tensor, key, value, mask, dropout_p, is_causal, enable_gqa: bool) -> bool:
    # those for fp32 know no groups of queries
    return query.shape[-1] <= MAX_HEAD_NUMEL and not (enable_gqa and query.dtype is torch.float32)


def _is_fused_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask, dropout_p, is_causal, enable_gqa) -> bool:
    query, key, value = (_sketch(tensor) for tensor in (query, key, value))
    mask = None if mask is None else _sketch(mask)
    choice = torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    return choice != int(SDPBackend.MATH)


def _sketch(tensor: Tensor) -> Tensor:
    """A CPU tensor of this shape, of a few elements that all rows share."""
    row = torch.empty(tensor.shape[-1], dtype=tensor.dtype)
    rows = row.as_strided(tensor.shape, (0,) * (tensor.dim() - 1) + (1,))
    return rows.requires_grad_(tensor.requires_grad)
