"""What one rank does for `benchmarks.long`: it counts the tensor bytes of steps at many lengths of sequences."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks import counters
from benchmarks.worker import Stepper
from tests.tensor_meter import TensorMeter


_aten = torch.ops.aten
# They take nearly all of a step's time, and no memory but their results.
PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
PRODUCTS_INTO = (_aten.mm.out, _aten.addmm.out, _aten.bmm.out)
PRODUCTS_IN_PLACE = (_aten.addmm_.default, _aten.baddbmm_.default)


class SkippedProducts(TorchDispatchMode):
    """Leaves out matrix products and attention: their results are zeros, in the same shape and layout. All else of a
    step runs, so every tensor is allocated and freed where it always is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS_INTO:
            return kwargs["out"].zero_()
        if func in PRODUCTS_IN_PLACE:
            return args[0]
        if func in PRODUCTS:
            shapes = func(*_on_meta(args), **_on_meta(kwargs))
            return tree_map_only(torch.Tensor, _zeros_like, shapes)
        return func(*args, **kwargs)


def _on_meta(values):
    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), values)


def _zeros_like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).zero_()


def count_lengths(spec: dict, rank: int) -> dict:
    """Counts the bytes of one step at each length, and finds the longest sequence within a budget.

    Args:
        spec: as for `benchmarks.worker`; and `lengths`, ascending; `budget_nbytes`; `most_nbytes`, above which the
            bytes of a length are only estimated; `skips`: without matrix products.
        rank: of this process.

    Returns:
        `peaks` and `rests`: bytes by length, of the rank that has most. `longest`: the longest sequence within the
        budget, and `is_bounded`: whether a longer one was found not to fit.
    """
    meter = TensorMeter()
    with meter:
        stepper = Stepper.of(spec, rank)
        stepper.run(spec["warmup"])
        counted = _Counted(stepper, meter, spec["skips"])
        for length in spec["lengths"]:
            if counted.estimate(length) > spec["most_nbytes"]:
                break
            counted.count(length)
        longest, is_bounded = _longest(counted, spec["lengths"], spec["budget_nbytes"])
    return {"peaks": counted.peaks, "rests": counted.rests, "longest": longest, "is_bounded": is_bounded}


class _Counted:
    """The lengths that were counted, with the same numbers on all ranks."""

    def __init__(self, stepper: Stepper, meter: TensorMeter, skips: bool):
        self.peaks: dict[int, int] = {}
        self.rests: dict[int, int] = {}
        self._stepper, self._meter, self._skips = stepper, meter, skips

    def estimate(self, length: int) -> float:
        """The peak at a length, in proportion to the two longest ones below it; 0 where there are none."""
        below = sorted(self.peaks)[-2:]
        if len(below) < 2:
            return 0.0
        (first, last), (low, high) = below, (self.peaks[each] for each in below)
        return high + (high - low) * (length - last) / (last - first)

    def count(self, length: int) -> int:
        """Takes a step at a length and returns its peak."""
        if length in self.peaks:
            return self.peaks[length]
        stepper, name = self._stepper, str(len(self.peaks))
        stepper.workload = replace(stepper.workload, seq=length)
        gc.collect()
        dist.barrier()
        self._meter.mark(f"begin-{name}")
        with SkippedProducts() if self._skips else contextlib.nullcontext():
            stepper.step(look=True)
        dist.barrier()
        self._meter.mark(f"end-{name}")
        self._meter.read()
        span = self._meter.span(f"begin-{name}", f"end-{name}")
        beside = counters.shared_nbytes() - stepper.host_nbytes  # what is offloaded does not count
        most = torch.tensor([span.peak_nbytes + beside, span.end_nbytes + beside], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self.peaks[length], self.rests[length] = (int(value) for value in most)
        return self.peaks[length]


def _longest(counted: _Counted, lengths: list[int], budget_nbytes: int) -> tuple[int, bool]:
    """Finds the longest sequence that fits by bisection, to a thirty-second of it and multiples of 64 tokens."""
    fitting = [length for length, peak in counted.peaks.items() if peak <= budget_nbytes]
    above = [length for length in lengths if length not in fitting]
    low, high = max(fitting, default=0), min(above, default=None)
    if high is None:
        return low, False
    while high - low > max(64, low // 32):
        middle = (low + high) // 2 // 64 * 64
        if middle in (low, high):
            break
        low, high = (middle, high) if counted.count(middle) <= budget_nbytes else (low, middle)
    return low, True
