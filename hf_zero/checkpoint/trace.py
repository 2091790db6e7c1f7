"""Traces with tensors without data from where every element of a converted tensor comes.

Conversion code runs as it is, on meta tensors. Views are read off their storage, offset and strides; what makes new
storage out of old (a clone, a concatenation) is written down as runs of elements. Other operations are kept on a tape
and can be done again, on real values, for as much of it as one result needs.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only


# A tensor of more runs is computed: a transposed matrix has as many as elements. Experts that are stacked have one or
# two each.
MAX_RUNS = 4096
ReadRange = Callable[[str, int, Tensor], None]  # fills a 1-D tensor with a named one's values from an element on
_CLONES = (torch.ops.aten.clone, torch.ops.aten._to_copy)


class Run(NamedTuple):
    """Elements [source, source + numel) of one flattened tensor that become elements [target, target + numel) of
    another."""

    name: str
    source: int
    target: int
    numel: int


def within(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yields the parts of runs that make elements [start, stop) of the target. The runs are in the target's order."""
    for index in range(max(0, bisect_right(runs, start, key=lambda run: run.target) - 1), len(runs)):
        name, source, target, numel = runs[index]
        if target >= stop:
            return
        first, last = max(start, target), min(stop, target + numel)
        if first < last:
            yield Run(name, source + first - target, first, last - first)


class TracedCall(NamedTuple):
    """An operation on tensors without data, and the storages that it takes and that it made or wrote to."""

    function: Any
    args: tuple
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]
    inputs: frozenset[int]
    made: frozenset[int]


@dataclass(frozen=True)
class Computation:
    """How a tensor is made of tensors of `Trace.new`, where that is more than a few runs of their elements."""

    meta: Tensor  # the result, without data
    steps: Sequence[TracedCall]  # the operations that lead to it, in their order
    sources: Mapping[str, Tensor]  # the tensors that it takes, without data

    @cached_property
    def num_parts(self) -> int:
        """Into how many parts, along their first dimension, the result and all that it is made of can be divided so
        that each part is made of the same parts alone: the number of experts where each is transposed. 1 is always
        right."""
        if self.meta.dim() < 2 or not all(_is_copy_by_parts(step) for step in self.steps):
            return 1
        leaves = [leaf for step in self.steps for leaf in _tensors_in((step.args, step.kwargs))]
        count = self.meta.shape[0]
        return count if all(_divides(leaf, count) for leaf in [*leaves, self.meta, *self.sources.values()]) else 1

    def of(self, values: Mapping[str, Tensor], num_parts: int | None = None) -> Tensor:
        """Does the operations again, and returns the result, 1-D, out of the 1-D values of all sources, whole or those
        of so many of `num_parts`. They may be written to."""
        held = {_storage(meta): values[name] for name, meta in self.sources.items()}
        for step in self.steps:
            real = step.function(*_real(step.args, held, num_parts), **_real(step.kwargs, held, num_parts))
            for meta, result in zip(step.outputs, _tensors_in(real)):
                numel = result.untyped_storage().nbytes() // result.itemsize
                held.setdefault(_storage(meta), result.as_strided((numel,), (1,), 0))
        return _real(self.meta, held, num_parts).contiguous().reshape(-1)

    def read(self, read_range: ReadRange, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the elements [start, stop) of the result, part by part, each with its first one: of tensors that are
        stacked, such as experts, one is in memory after the other."""
        num_parts, numel = self.num_parts, self.meta.numel() // self.num_parts
        for part in range(start // numel, -(-stop // numel)):
            values = {}
            for name, meta in self.sources.items():
                values[name] = torch.empty(meta.numel() // num_parts, dtype=meta.dtype)
                read_range(name, part * values[name].numel(), values[name])
            result = self.of(values, 1 if num_parts > 1 else None)
            first, last = max(start - part * numel, 0), min(stop - part * numel, numel)
            yield part * numel + first, result[first:last]


class Trace(TorchDispatchMode):
    """Follows operations on the tensors of `new`, in this thread and while the context lasts."""

    def __init__(self):
        super().__init__()
        self._written: dict[int, list[Run] | None] = {}  # by storage; None: elements were computed, not copied
        self._kept: list[Tensor] = []  # a storage's number is its own as long as it lives
        self._roots: dict[str, Tensor] = {}
        self._tape: list[TracedCall] = []

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Makes a tensor without data and with a name, under which its elements are found again."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._roots[name] = tensor
        self._written[_storage(tensor)] = [Run(name, 0, 0, tensor.numel())]
        return tensor

    def knows(self, tensor: Tensor) -> bool:
        """Whether the elements of a tensor come from tensors of `new`."""
        return tensor.device.type == "meta" and _storage(tensor) in self._written

    def runs_of(self, tensor: Tensor) -> list[Run] | None:
        """Returns the runs of tensors of `new` that make a tensor, row by row; `None` where it is not made by copies
        alone, or has more than `MAX_RUNS` runs."""
        runs = self._laid([(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))])
        return runs if runs is not None and sum(run.numel for run in runs) == tensor.numel() else None

    def computation_of(self, tensor: Tensor) -> Computation:
        """Returns how a tensor is computed: the part of the tape that it depends on."""
        needed, steps, roots = {_storage(tensor)}, [], {_storage(root): name for name, root in self._roots.items()}
        for step in reversed(self._tape):
            if needed.isdisjoint(step.made):
                continue
            if step.function.overloadpacket is torch.ops.aten.empty and step.made <= roots.keys():
                continue  # in `new`, whose values are given
            steps.append(step)
            needed |= step.inputs
        sources = {name: self._roots[name] for storage, name in roots.items() if storage in needed}
        return Computation(tensor, steps[::-1], sources)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func.is_view:
            return outputs  # of known storage: there is nothing to note
        inputs = _tensors_in((args, kwargs))
        made = [tensor for tensor in _tensors_in(outputs) if tensor.device.type == "meta"]
        former = frozenset(_storage(tensor) for tensor in inputs if tensor.device.type == "meta")
        fresh = [tensor for tensor in made if _storage(tensor) not in former]
        if func._schema.is_mutable:
            for tensor in made:
                self._written[_storage(tensor)] = None
        if fresh or func._schema.is_mutable:
            self._kept += fresh
            self._tape.append(TracedCall(func, args, kwargs, made, former, frozenset(map(_storage, made))))
            for tensor in fresh:
                self._note(tensor, func.overloadpacket, args, kwargs, inputs)
        return outputs

    def _note(self, out: Tensor, packet, args, kwargs, inputs: list[Tensor]) -> None:
        if not any(self.knows(tensor) for tensor in inputs):
            return
        places: Iterable[Tensor] | None = None  # the parts of `out` to which the inputs are copied
        if packet in _CLONES:
            places = [out]
        elif packet is torch.ops.aten.cat:
            inputs = [tensor for tensor in inputs if tensor.dim() == out.dim()]  # torch passes over an empty vector
            dim = _dim_of(out, args, kwargs)
            places = out.split([tensor.shape[dim] for tensor in inputs], dim)
        elif packet is torch.ops.aten.stack:
            places = out.unbind(_dim_of(out, args, kwargs))
        self._written[_storage(out)] = None if places is None else self._laid(zip(inputs, places))

    def _laid(self, copies: Iterable[tuple[Tensor, Tensor]]) -> list[Run] | None:
        """Returns the runs that copy tensors, each to a view of one storage; `None` where these are not known, or too
        many."""
        runs: list[Run] = []
        for tensor, place in copies:
            copied = self._copied(tensor, place) if tensor.dtype is place.dtype else None
            if copied is None:
                return None
            runs += copied
        return _joined(runs)

    def _copied(self, view: Tensor, place: Tensor) -> list[Run] | None:
        """Returns the runs of one copy, in no order."""
        if not view.numel():
            return []
        written = self._written.get(_storage(view)) if view.device.type == "meta" else None
        loops = _loops(view, place.stride())
        numel = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
        if written is None or prod(size for size, _, _ in loops) > MAX_RUNS:
            return None
        runs: list[Run] = []
        for steps in product(*(range(size) for size, _, _ in loops)):
            source = view.storage_offset() + sum(step * loop[1] for step, loop in zip(steps, loops))
            target = place.storage_offset() + sum(step * loop[2] for step, loop in zip(steps, loops))
            for name, first, at, count in within(written, source, source + numel):
                runs.append(Run(name, first, target + at - source, count))
        return runs


def _tensors_in(tree) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _loops(view: Tensor, strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns loops (size, step in the source, step in the target) over the elements of a view that are laid out with
    these strides: as few as possible, those with the largest steps of the target first."""
    loops: list[tuple[int, int, int]] = []
    given = (loop for loop in zip(view.shape, view.stride(), strides) if loop[0] != 1)
    for size, source, target in sorted(given, key=lambda loop: loop[2], reverse=True):
        if loops and loops[-1][1:] == (size * source, size * target):
            loops[-1] = (loops[-1][0] * size, source, target)
        else:
            loops.append((size, source, target))
    return loops


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Joins runs that continue one another, and sorts them in the order of the target."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.target):
        name, source, target, numel = joined[-1] if joined else ("", 0, 0, 0)
        if joined and (name, source + numel, target + numel) == run[:3]:
            joined[-1] = Run(name, source, target, numel + run.numel)
        else:
            joined.append(run)
    return joined


def _dim_of(out: Tensor, args, kwargs) -> int:
    """Returns the dimension along which `cat` and `stack` lay their inputs."""
    return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()


def _is_copy_by_parts(step: TracedCall) -> bool:
    """Whether an operation copies each part along the first dimension separately, if its tensors are divided so."""
    packet = step.function.overloadpacket
    return packet in _CLONES or (packet is torch.ops.aten.cat and _dim_of(step.outputs[0], step.args, step.kwargs) > 0)


def _divides(tensor: Tensor, count: int) -> bool:
    """Whether each part of a tensor along its first dimension lies in one part of its storage."""
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:])
    )
    is_stacked = tensor.dim() > 1 and tensor.shape[0] == count and tensor.stride(0) * count == numel
    return is_stacked and last < tensor.stride(0)


def _real(tree, held: Mapping[int, Tensor], num_parts: int | None = None):
    """Returns the arguments with data: views of the real storages, on the device of these."""

    def value(meta: Tensor) -> Tensor:
        if _storage(meta) not in held:
            return meta
        flat = held[_storage(meta)]
        if flat.dtype is not meta.dtype:
            flat = flat.view(meta.dtype)
        shape = meta.shape if num_parts is None else (num_parts, *meta.shape[1:])
        return flat.as_strided(shape, meta.stride(), meta.storage_offset())

    tree = tree_map_only(Tensor, value, tree)
    device = next((flat.device for flat in held.values()), torch.device("cpu"))
    return tree_map_only(torch.device, lambda _: device, tree)
