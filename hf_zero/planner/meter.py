"""Counts the memory that tensors on the meta device would take, and the work of the operations on them.

Attention counts the memory of the kernel that a device would choose. On the meta device, torch itself would choose the
plain formula, which stores all scores.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.activation import tiled_mlp, vocabulary_ranges
from hf_zero.compat import replaced
from hf_zero.config import MemoryTier
from hf_zero.engine.away import in_backward
from hf_zero.engine.hooks import tensors_in
from hf_zero.planner.operations import operation_of
from hf_zero.planner.timeline import Timeline


T = TypeVar("T")

_aten = torch.ops.aten
_PLAIN = F.scaled_dot_product_attention
_FUSED = _aten._scaled_dot_product_flash_attention_for_cpu
# The largest head dimension of fused kernels on GPUs.
MAX_HEAD_NUMEL = 256
# Number of blocks at each end of a pass that are recorded individually; alternating buffers affect two.
NUM_EDGE = 3


def _computes_again() -> bool:
    """Whether a checkpointed block is recomputing its forward: tensors are being saved during a backward."""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Meter(TorchDispatchMode):
    """While active, counts every storage on the meta device from its creation until it is freed, and adds the work of
    operations to its timeline."""

    def __init__(self):
        super().__init__()
        self.timeline = Timeline()
        self.held: Counter[MemoryTier] = Counter()  # current size
        self.peak = 0  # maximum on the device since the last `reset_peak`
        self._tier = MemoryTier.DEVICE
        self._share = 1
        self._storages: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Resets the peak to the current size."""
        self.peak = self.held[MemoryTier.DEVICE]

    @contextmanager
    def at(self, tier: MemoryTier, share: int = 1) -> Iterator[None]:
        """Counts tensors created inside on `tier`. Memory shared by `share` ranks is divided among them."""
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
        self.peak = max(self.peak, self.held[MemoryTier.DEVICE])


class PeakRecorder:
    """Records the size at the end of the last block's forward, and the peaks between moments of a step."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._handles: list = []
        self._begin = self._at_end_of_blocks = meter.held[MemoryTier.DEVICE]
        self._laps: list[tuple[str, int]] = []
        self._last: nn.Module | None = None  # the block whose backward started last
        self._is_paused = False
        meter.reset_peak()

    @property
    def activations(self) -> int:
        return self._at_end_of_blocks - self._begin

    @property
    def head(self) -> int:
        """The maximum increase from the end of the last block's forward to the start of its backward."""
        return max((nbytes for name, nbytes in self._laps if name == "head"), default=0) - self._at_end_of_blocks

    def moments(self) -> dict[str, int]:
        """Returns the laps by name. Of laps that occur once per block, only the first and last few are included."""
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
        self._laps.append((name, self._meter.peak))
        self._meter.reset_peak()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records no blocks inside the context, so that a pass of a reference model counts as one interval (`lap`)."""
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
    """Makes a chunked loss and tiled MLPs compute only their first two parts, one of the middle parts, and the last.
    The middle parts reuse the same memory, and the timeline counts each of them."""
    ranges, tiles = vocabulary_ranges.slices_of, tiled_mlp.tiles_of
    few_ranges = replaced(vocabulary_ranges, slices_of=lambda *args: _few(ranges(*args), timeline))
    with few_ranges, replaced(tiled_mlp, tiles_of=lambda *args: _few(tiles(*args), timeline)):
        yield


def _few(parts: Iterable[T], timeline: Timeline) -> Iterator[T]:
    every = list(parts)
    yield from every[:2]  # the first part writes gradients, the second adds to them
    if len(every) > 3:
        with timeline.repeated(len(every) - 3):
            yield every[2]
    yield from every[2:][-1:]


class _OfBias(torch.autograd.Function):
    """Identity whose backward also allocates the gradient of a learned attention bias (T5), one element per attention
    score, as fused GPU kernels do. The CPU kernel used in their place does not support a bias that requires grad."""

    @staticmethod
    def forward(ctx, attended: Tensor, bias: Tensor) -> Tensor:
        ctx.shape = bias.shape
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, gradient.new_zeros(ctx.shape)


@contextmanager
def device_attention(on_cpu: bool) -> Iterator[None]:
    """Makes `scaled_dot_product_attention` of meta tensors take the memory that it takes on a device.

    For CPUs, torch is asked which kernel it would choose. For GPUs, a fused kernel is assumed if one exists. All of
    them keep the output and one number per query."""

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
        if query.is_meta and mask is not None and mask.dtype is torch.bool:  # torch also converts it in each call
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        is_fused = _is_fused_on_cpu if on_cpu else _is_fused_on_gpu
        if not query.is_meta or not is_fused(query, key, value, mask, dropout_p, is_causal, enable_gqa):
            return _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if mask is None or not mask.requires_grad:
            return _FUSED(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        attended = _FUSED(query, key, value, 0.0, is_causal, attn_mask=mask.detach(), scale=scale)[0]
        return _OfBias.apply(attended, mask.expand(*query.shape[:-1], key.shape[-2]))

    # a `TorchFunctionMode` would not be active in backward, where checkpointed blocks are recomputed
    with replaced(F, scaled_dot_product_attention=attend):
        yield


def _is_fused_on_gpu(query: Tensor, key, value, mask, dropout_p, is_causal, enable_gqa: bool) -> bool:
    # fp32 kernels do not support grouped queries
    return query.shape[-1] <= MAX_HEAD_NUMEL and not (enable_gqa and query.dtype is torch.float32)


def _is_fused_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask, dropout_p, is_causal, enable_gqa) -> bool:
    query, key, value = (_sketch(tensor) for tensor in (query, key, value))
    mask = None if mask is None else _sketch(mask)
    choice = torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    return choice != int(SDPBackend.MATH)


def _sketch(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor with the shape of `tensor` whose rows share memory."""
    row = torch.empty(tensor.shape[-1], dtype=tensor.dtype)
    rows = row.as_strided(tensor.shape, (0,) * (tensor.dim() - 1) + (1,))
    return rows.requires_grad_(tensor.requires_grad)
