"""What one rank does for `benchmarks.long`: it counts the tensor bytes of steps at many lengths of sequences."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks import counters
from benchmarks.worker import Stepper
from tests.tensor_meter import TensorMeter


_aten = torch.ops.aten
PRODUCTS_INTO = (_aten.mm.out, _aten.addmm.out, _aten.bmm.out)
IN_PLACE = (_aten.addmm_, _aten.baddbmm_, _aten.add_, _aten.sub_, _aten.mul_, _aten.div_, _aten.exp_)
_NO_SHAPE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


_LIBC = ctypes.CDLL(None, use_errno=True)


class SkippedWork(TorchDispatchMode):
    """Leaves out what operators compute that make tensors of so many elements or more: these are allocated, in the
    same shape and layout, and are zeros, for which the system needs no memory. Matrix products into given tensors,
    which ranks may share, write zeros. All else of a step runs: every tensor is allocated and freed where it is."""

    def __init__(self, min_numel: int):
        super().__init__()
        self._min_numel = min_numel
        self._forms: dict[tuple, Any] = {}  # what an operator makes, or `None` where it computes, by what it is given

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if types or func.namespace != "aten":
            return func(*args, **kwargs)
        if func in PRODUCTS_INTO:
            return kwargs["out"].zero_()
        if func.overloadpacket in IN_PLACE and args[0].numel() >= self._min_numel:
            return args[0]
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        key = func, _form(args), _form(tuple(kwargs.items()))
        if key not in self._forms:
            self._forms[key] = self._skipped(func, args, kwargs)
        made = self._forms[key]
        return func(*args, **kwargs) if made is None else tree_map_only(torch.Tensor, _zeros, made)

    def _skipped(self, func, args, kwargs):
        """What an operator makes, without values; `None` where it is to be computed."""
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves(args)):
            return None
        on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        shapes = func(*_on_meta(args), **{**_on_meta(kwargs), **on_meta})
        made = [each for each in tree_leaves(shapes) if isinstance(each, torch.Tensor)]
        large = [each for each in made if each.numel() >= self._min_numel]
        return shapes if large and all(each.is_floating_point() for each in large) else None


@functools.cache
def _makes_tensors(func: torch._ops.OpOverload) -> bool:
    """Whether all that an operator returns is new, and its shapes depend on shapes alone."""
    schema = func._schema
    return not _NO_SHAPE & set(func.tags) and all(
        each.alias_info is None for each in (*schema.arguments, *schema.returns)
    )


def _form(value) -> tuple:
    """What says in which form an operator's results are."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_form(each) for each in value)
    return type(value), value


def _on_meta(values):
    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), values)


def _zeros(meta: torch.Tensor) -> torch.Tensor:
    """Zeros like a tensor without values. Whole pages are given back to the system, which hands out zeros in place."""
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    begin, size = made.untyped_storage().data_ptr(), mmap.PAGESIZE
    end = begin + made.untyped_storage().nbytes()
    first, last = -(-begin // size) * size, end // size * size
    if first >= last:
        return made.zero_()
    if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
    return made


def count_lengths(spec: dict, rank: int) -> dict:
    """Counts the bytes of one step at each length, and finds the longest sequence within a budget.

    Args:
        spec: as for `benchmarks.worker`, whose steps come first; and `lengths`, ascending; `budget_nbytes`;
            `most_nbytes` and `most_tokens`: longer sequences are not tried, nor those with which a process would have
            more memory resident;
            `skips`: from how many elements on tensors are not computed, see `SkippedWork`; 0 computes all.
        rank: of this process.

    Returns:
        `peaks`, `rests` and `hosts`: bytes by length, of the rank that has most, without those on the host and of
        these alone. `residents`: the most memory a process had resident, which is less where tensors are not computed.
        `longest`: the longest sequence within the budget, and `is_bounded`: whether a longer one was
        found not to fit.
    """
    meter = TensorMeter()
    with meter, contextlib.ExitStack() as stack:
        stepper = Stepper.of(spec, rank)
        stepper.run(spec["warmup"])
        if spec["skips"]:
            stack.enter_context(SkippedWork(spec["skips"]))
        counted = _Counted(stepper, meter, spec["most_nbytes"], spec["most_tokens"])
        for length in spec["lengths"]:
            if not counted.has_room_for(length):
                break
            counted.count(length)
        longest, is_bounded = _longest(counted, spec["budget_nbytes"])
    found = {name: getattr(counted, name) for name in ("peaks", "rests", "hosts", "residents")}
    return {**found, "longest": longest, "is_bounded": is_bounded}


@dataclass(frozen=True)
class _Line:
    """Bytes as they grow with the length of sequences: a straight line."""

    base: float
    slope: float

    def at(self, length: int) -> float:
        return self.base + self.slope * length

    def reaches(self, nbytes: int) -> float:
        """The length at which there are so many bytes."""
        return (nbytes - self.base) / self.slope if self.slope > 0 else float("inf")


class _Counted:
    """The lengths that were counted, with the same numbers on all ranks."""

    def __init__(self, stepper: Stepper, meter: TensorMeter, most_nbytes: int, most_tokens: int):
        self.peaks: dict[int, int] = {}
        self.rests: dict[int, int] = {}
        self.hosts: dict[int, int] = {}
        self.residents: dict[int, int] = {}
        self._stepper, self._meter = stepper, meter
        self._most_nbytes, self.most_tokens = most_nbytes, most_tokens

    def has_room_for(self, length: int) -> bool:
        """Whether a step of this length may be tried."""
        return length <= self.most_tokens and self.line("residents").at(length) <= self._most_nbytes

    def line(self, name: str, near: int | None = None) -> _Line:
        """The line through two counted lengths: the longest, or those whose bytes are nearest to `near`."""
        by_length = getattr(self, name)
        order = sorted(by_length, reverse=True)
        if near is not None:
            order.sort(key=lambda length: abs(by_length[length] - near))
        if len(order) < 2:
            return _Line(0.0, 0.0)
        first, last = sorted(order[:2])
        slope = (by_length[last] - by_length[first]) / (last - first)
        return _Line(by_length[first] - slope * first, slope)

    def count(self, length: int) -> int:
        """Takes a step at a length and returns its peak."""
        if length in self.peaks:
            return self.peaks[length]
        stepper, name = self._stepper, str(len(self.peaks))
        stepper.workload = replace(stepper.workload, seq=length)
        gc.collect()
        dist.barrier()
        self._meter.mark(f"begin-{name}")
        counters.reset_resident_peak()
        stepper.step(look=True)
        dist.barrier()
        self._meter.mark(f"end-{name}")
        self._meter.read()
        span = self._meter.span(f"begin-{name}", f"end-{name}")
        # what is offloaded does not count, and a part of it is not counted as tensors
        beside = counters.shared_nbytes() + stepper.mode.mapped_nbytes() - stepper.host_nbytes
        found = (span.peak_nbytes + beside, span.end_nbytes + beside, stepper.host_nbytes)
        found += (counters.resident_peak_nbytes(),)
        most = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for by_length, value in zip((self.peaks, self.rests, self.hosts, self.residents), most):
            by_length[length] = int(value)
        return self.peaks[length]


def _longest(counted: _Counted, budget_nbytes: int) -> tuple[int, bool]:
    """Finds the longest sequence that fits, to a thirty-second of it and multiples of 64 tokens.

    Peaks grow with the length by a straight line in which there are few bends, so what is tried next is where the line
    through the two nearest peaks reaches the budget.
    """
    while True:
        low = max((length for length, peak in counted.peaks.items() if peak <= budget_nbytes), default=0)
        high = min((length for length in counted.peaks if length > low), default=None)
        step = max(64, low // 32 // 64 * 64)
        if high is not None and high - low <= step:
            return low, True
        guess = counted.line("peaks", near=budget_nbytes).reaches(budget_nbytes)
        if high is None:
            guess = min(guess, 2 * low, counted.most_tokens)
        elif not low < guess < high:
            guess = (low + high) / 2
        length = max(low + step, int(guess) // 64 * 64)
        if not counted.has_room_for(length):
            return low, False
        counted.count(length)
