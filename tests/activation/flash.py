"""The functions of the package flash-attn, computed by plain attention: the way to them can be tried anywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Flash:
    """What the functions were called with: heads, the bounds of the rows that were joined, and the window."""

    def __init__(self):
        self.heads: set[int] = set()
        self.cuts: set[tuple[int, ...]] = set()
        self.windows: set[tuple[int, int]] = set()

    def rows(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale=None, causal=False, window_size=(-1, -1)) -> Tensor:
        """`flash_attn_func`, of `(batch, length, heads, dim)`."""
        self._note(q.shape[2], (), window_size)
        return _attend(q, k, v, torch.zeros(q.shape[1]), softmax_scale, causal, window_size)

    def joined(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ) -> Tensor:
        """`flash_attn_varlen_func`, of `(tokens, heads, dim)`."""
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() and cu_seqlens_q[-1] == len(q)
        assert int(max_seqlen_q) == int(max_seqlen_k) == cu_seqlens_q.diff().max()
        self._note(q.shape[1], tuple(cu_seqlens_q.tolist()), window_size)
        row_of = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        return _attend(q[None], k[None], v[None], row_of, softmax_scale, causal, window_size)[0]

    def _note(self, heads: int, cuts: tuple[int, ...], window: tuple[int, int]) -> None:
        self.heads.add(heads)
        self.cuts.add(cuts)
        self.windows.add(window)


def _attend(q: Tensor, k: Tensor, v: Tensor, row_of: Tensor, scale, causal: bool, window: tuple[int, int]) -> Tensor:
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    sees = row_of[:, None] == row_of
    if causal:
        sees = sees & (behind >= 0)
    if window[0] >= 0:
        sees = sees & (behind <= window[0])
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=True).transpose(1, 2)


@contextmanager
def flash_attention(model: nn.Module) -> Iterator[Flash]:
    """Lets a model of transformers attend by `flash_attention_2`, and yields what its functions are called with."""
    from transformers import modeling_flash_attention_utils as utils

    flash = Flash()
    functions = (flash.rows, flash.joined, None, utils._pad_input, utils._unpad_input)
    loaded = {name: None for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn")}
    loaded |= {name: None for name in ("_unpad_fn", "_flash_with_kvcache_fn", "_process_flash_kwargs_fn")}
    before = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    with mock.patch.multiple(utils, _lazy_imports=lambda *_, **__: functions, **loaded):
        yield flash
    model.config._attn_implementation = before
