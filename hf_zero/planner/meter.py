"""Counts the bytes that tensors on the meta device would take with data, and the work of the operations on them.

Attention takes the memory there of the kernel that a device would choose: torch itself would take the plain formula,
with all its scores.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.activation import tiled_mlp, vocabulary_ranges
from hf_zero.config import MemoryTier
from hf_zero.engine.away import in_backward
from hf_zero.engine.hooks import tensors_in
from hf_zero.planner.operations import operation_of
from hf_zero.planner.timeline import Timeline


T = TypeVar("T")

_aten = torch.ops.aten
_PLAIN = F.scaled_dot_product_attention
_FUSED = _aten._scaled_dot_product_flash_attention_for_cpu
# The largest head that fused kernels of GPUs take.
MAX_HEAD_NUMEL = 256
# As many blocks at either end of a pass are looked at apart: buffers that take turns are two.
NUM_EDGE = 3


def _computes_again() -> bool:
    """Whether a checkpointed block computes its forward once more: what it saves is asked for in a backward."""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Meter(TorchDispatchMode):
    """Counts, while it is entered, every storage on the meta device from the operation that makes it until it is
    freed. Its timeline gets what the operations compute."""

    def __init__(self):
        super().__init__()
        self.timeline = Timeline()
        self.held: Counter[MemoryTier] = Counter()  # bytes at this moment
        self.peak: Counter[MemoryTier] = Counter()  # most since the last `reset_peak`
        self._tier = MemoryTier.DEVICE
        self._share = 1
        self._storages: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Makes what is held now the peak so far."""
        self.peak = Counter(self.held)

    @contextmanager
    def at(self, tier: MemoryTier, share: int = 1) -> Iterator[None]:
        """Counts tensors that are made inside on `tier`. Of memory that several ranks share, each counts its part."""
        before = self._tier, self._share
        self._tier, self._share = tier, share
        try:
            yield
        finally:
            self._tier, self._share = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, operation_of(func)
        if operation.product is not None and args[0].is_meta:
            with self:
                return operation.product(*args, **kwargs)
        result, work = operation.run(args, kwargs, measures=self.timeline.recording)
        if work is not None:
            self.timeline.compute(*work, again=work[0] > 0 and _computes_again())
        if isinstance(result, Tensor):
            self._note(result)
        elif isinstance(result, (tuple, list)):
            for each in result:
                if isinstance(each, Tensor):
                    self._note(each)
        return result

    def _note(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        tier, nbytes = self._tier, storage.nbytes() // self._share

        def freed(_):
            self._storages.pop(key, None)
            self.held[tier] -= nbytes

        self._storages[key] = weakref.ref(storage, freed)
        self.held[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.held[tier])


class PeakRecorder:
    """Records the bytes that are held when the last block's forward ends, and the peaks between the moments of a
    step."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._handles: list = []
        self._begin = self._at_end_of_blocks = meter.held[MemoryTier.DEVICE]
        self._laps: list[tuple[str, int]] = []
        self._last: nn.Module | None = None  # whose backward was come to last
        self._is_paused = False
        meter.reset_peak()

    @property
    def activations(self) -> int:
        return self._at_end_of_blocks - self._begin

    @property
    def head(self) -> int:
        """The most bytes that are added until backward comes to the last block."""
        return max((nbytes for name, nbytes in self._laps if name == "head"), default=0) - self._at_end_of_blocks

    def moments(self) -> dict[str, int]:
        """The laps by name. Of the laps that each block has, only the first and the last few are given."""
        found: dict[str, int] = {}
        for kind in dict.fromkeys(name for name, _ in self._laps):
            own = [nbytes for name, nbytes in self._laps if name == kind]
            found.update({f"{kind} {index}": nbytes for index, nbytes in enumerate(own[:NUM_EDGE])})
            found.update({f"{kind} -{index}": nbytes for index, nbytes in enumerate(own[: -NUM_EDGE - 1 : -1])})
        return found

    def follow(self, block: nn.Module) -> None:
        self._handles.append(block.register_forward_hook(self._after_block))

    def lap(self, name: str) -> None:
        """Records the peak since the last lap."""
        self._laps.append((name, self._meter.peak[MemoryTier.DEVICE]))
        self._meter.peak[MemoryTier.DEVICE] = self._meter.held[MemoryTier.DEVICE]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Looks at no block inside: a pass of the reference is one lap."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _after_block(self, module, _args, output) -> None:
        if self._is_paused or in_backward():
            return
        self.lap("block")
        self._at_end_of_blocks = self._meter.held[MemoryTier.DEVICE]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(module))

    def _before_backward(self, module: nn.Module) -> None:
        if module is not self._last:
            self.lap("head" if self._last is None else "block's backward")
            self._last = module

    def end(self) -> None:
        self.lap("update")
        for handle in self._handles:
            handle.remove()


@contextmanager
def few_parts(timeline: Timeline) -> Iterator[None]:
    """Makes a chunked loss and tiled MLPs compute their first two parts, the third one in place of all that are equal
    to it, and the last. They take the same memory one after the other, and the timeline counts each."""
    ranges, tiles = vocabulary_ranges.slices_of, tiled_mlp.tiles_of
    few_ranges = patch.object(vocabulary_ranges, "slices_of", lambda *args: _few(ranges(*args), timeline))
    few_tiles = patch.object(tiled_mlp, "tiles_of", lambda *args: _few(tiles(*args), timeline))
    with few_ranges, few_tiles:
        yield


def _few(parts: Iterable[T], timeline: Timeline) -> Iterator[T]:
    every = list(parts)
    yield from every[:2]  # gradients are first written, and then added
    if len(every) > 3:
        with timeline.repeated(len(every) - 3):
            yield every[2]
    yield from every[2:][-1:]


class _OfBias(torch.autograd.Function):
    """Gives a learned bias of the scores, as T5 has, a gradient for each score, as the fused kernels of GPUs do. That
    of CPUs, which stands for them, knows none."""

    @staticmethod
    def forward(ctx, attended: Tensor, bias: Tensor) -> Tensor:
        ctx.shape = bias.shape
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, gradient.new_zeros(ctx.shape)


@contextmanager
def device_attention(on_cpu: bool) -> Iterator[None]:
    """Makes `scaled_dot_product_attention` of tensors without data take the memory that it takes on a device.

    On CPUs torch is asked which kernel it would choose. On GPUs it is taken to be a fused one where there is one: they
    keep the output and one number for each query, whatever their name."""

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
        if mask is None or not mask.requires_grad:
            return _FUSED(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        attended = _FUSED(query, key, value, 0.0, is_causal, attn_mask=mask.detach(), scale=scale)[0]
        return _OfBias.apply(attended, mask.expand(*query.shape[:-1], key.shape[-2]))

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
    """Returns a CPU tensor of this shape, of a few elements that all rows share."""
    row = torch.empty(tensor.shape[-1], dtype=tensor.dtype)
    rows = row.as_strided(tensor.shape, (0,) * (tensor.dim() - 1) + (1,))
    return rows.requires_grad_(tensor.requires_grad)
