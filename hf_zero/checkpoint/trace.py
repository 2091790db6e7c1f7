"""Traces where every element of a converted tensor comes from, by tensors without data.

Conversion code runs as it is, on meta tensors. Views are read off their storage, offset and strides; what makes new
storage out of old (a clone, a concatenation) is written down as runs of elements. Other operations are kept on a tape
and can be done again, on real values, for as much of it as one result needs.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_CLONES = (torch.ops.aten.clone, torch.ops.aten._to_copy)


class Run(NamedTuple):
    """Elements [source, source + numel) of a flattened tensor, which are elements [target, target + numel) of another
    that is made of it."""

    name: str
    source: int
    target: int
    numel: int


def within(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yields the parts of runs, given in the order of the target, that are its elements [start, stop)."""
    for index in range(max(0, bisect_right(runs, start, key=lambda run: run.target) - 1), len(runs)):
        name, source, target, numel = runs[index]
        if target >= stop:
            return
        first, last = max(start, target), min(stop, target + numel)
        if first < last:
            yield Run(name, source + first - target, first, last - first)


class Trace(TorchDispatchMode):
    """Follows operations on the tensors of `new`, in this thread and while the context lasts."""

    def __init__(self):
        super().__init__()
        self._written: dict[int, list[Run] | None] = {}  # by storage; None: elements were computed, not copied
        self._kept: list[Tensor] = []  # a storage's number is its own as long as it lives
        self._roots: dict[str, Tensor] = {}
        self._tape: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Makes a tensor without data, under whose name its elements are found again."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._roots[name] = tensor
        self._written[_storage(tensor)] = [Run(name, 0, 0, tensor.numel())]
        return tensor

    def knows(self, tensor: Tensor) -> bool:
        """Whether the elements of a tensor come out of tensors of `new`."""
        return tensor.device.type == "meta" and _storage(tensor) in self._written

    def runs_of(self, tensor: Tensor) -> list[Run] | None:
        """The runs that make a tensor, laid out row by row, out of tensors of `new`; `None` when it is not made by
        copying alone, or of more than `MAX_RUNS` pieces."""
        runs = self._copied(tensor, torch.empty(tensor.shape, device="meta").stride(), 0)
        return runs if runs is not None and sum(run.numel for run in runs) == tensor.numel() else None

    def source(self, name: str) -> Tensor:
        """The tensor of `new` that has this name."""
        return self._roots[name]

    def sources_of(self, tensor: Tensor) -> list[str]:
        """Names of all tensors of `new` that a tensor is computed from."""
        needed = self._needed(tensor)[1]
        return [name for name, root in self._roots.items() if _storage(root) in needed]

    def num_parts_of(self, tensor: Tensor) -> int:
        """Into how many parts, along their first dimension, a tensor and all that it is made of can be divided so that
        each part is made of the same parts alone: the number of experts where each is transposed. 1 is always right.
        """
        tape, needed = self._needed(tensor)
        roots = {_storage(root): root for root in self._roots.values() if _storage(root) in needed}
        steps = [step for step in tape if not all(_storage(out) in roots for out in step[3])]  # `new` is none
        if tensor.dim() < 2 or not all(_is_copy_by_parts(*step) for step in steps):
            return 1
        leaves = [leaf for _, *step in steps for leaf in tree_flatten(step)[0] if isinstance(leaf, Tensor)]
        leaves += [tensor, *roots.values()]
        count = tensor.shape[0]
        return count if all(_divides(leaf, count) for leaf in leaves) else 1

    def values_of(self, tensor: Tensor, values: Mapping[str, Tensor], num_parts: int | None = None) -> Tensor:
        """Does the operations again that led to a tensor.

        Args:
            tensor (`Tensor`): without data.
            values (`Mapping[str, Tensor]`): of its `sources_of`, each 1-D and whole; may be written to.
            num_parts (`int`, *optional*): the values are so many of the `num_parts_of` the tensor, and no whole ones.

        Returns:
            `Tensor`: with data, row by row; of these parts, if they are given.
        """
        tape, needed = self._needed(tensor)
        held = {_storage(root): values[name] for name, root in self._roots.items() if _storage(root) in needed}
        for function, args, kwargs, outputs in tape:
            real = function(*_real(args, held, num_parts), **_real(kwargs, held, num_parts))
            results = [leaf for leaf in tree_flatten(real)[0] if isinstance(leaf, Tensor)]
            for meta, result in zip(outputs, results):
                numel = result.untyped_storage().nbytes() // result.itemsize
                held.setdefault(_storage(meta), result.as_strided((numel,), (1,), 0))
        return _real(tensor, held, num_parts).contiguous()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func.is_view:
            return outputs  # of known storage: there is nothing to note
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.device.type == "meta"]
        former = {_storage(tensor) for tensor in inputs if tensor.device.type == "meta"}
        fresh = [tensor for tensor in made if _storage(tensor) not in former]
        if func._schema.is_mutable:
            for tensor in made:
                self._written[_storage(tensor)] = None
        if fresh or func._schema.is_mutable:
            self._kept += fresh
            self._tape.append((func, args, kwargs, made))
            for tensor in fresh:
                self._note(tensor, func.overloadpacket, args, kwargs, inputs)
        return outputs

    def _note(self, out: Tensor, packet, args, kwargs, inputs: list[Tensor]) -> None:
        if not any(self.knows(tensor) for tensor in inputs):
            return
        runs = None
        if packet in _CLONES and out.dtype is inputs[0].dtype:
            runs = self._copied(inputs[0], out.stride(), out.storage_offset())
        elif packet is torch.ops.aten.cat:
            runs = self._side_by_side(out, inputs, _dim_of(out, args, kwargs))
        elif packet is torch.ops.aten.stack:
            dim = _dim_of(out, args, kwargs)
            runs = self._side_by_side(out, [_with_dim(tensor, dim) for tensor in inputs], dim)
        self._written[_storage(out)] = runs

    def _side_by_side(self, out: Tensor, inputs: list[Tensor], dim: int) -> list[Run] | None:
        runs: list[Run] = []
        position = 0
        for tensor in inputs:
            if tensor.dim() != out.dim():
                continue  # torch passes over an empty vector
            offset = out.storage_offset() + position * out.stride(dim)
            copied = self._copied(tensor, out.stride(), offset) if tensor.dtype is out.dtype else None
            if copied is None:
                return None
            runs += copied
            position += tensor.shape[dim]
        return _joined(runs)

    def _copied(self, view: Tensor, strides: Sequence[int], offset: int) -> list[Run] | None:
        """The runs by which the elements of a view come to lie with these strides."""
        if not view.numel():
            return []
        written = self._written.get(_storage(view)) if view.device.type == "meta" else None
        loops = _loops(view, strides)
        numel = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
        if written is None or prod(size for size, _, _ in loops) > MAX_RUNS:
            return None
        runs: list[Run] = []
        for steps in product(*(range(size) for size, _, _ in loops)):
            source = view.storage_offset() + sum(step * loop[1] for step, loop in zip(steps, loops))
            target = offset + sum(step * loop[2] for step, loop in zip(steps, loops))
            for name, first, at, count in within(written, source, source + numel):
                runs.append(Run(name, first, target + at - source, count))
        return _joined(runs)

    def _needed(self, tensor: Tensor) -> tuple[list, set[int]]:
        """The part of the tape that a tensor depends on, and all storages that take part."""
        needed, part = {_storage(tensor)}, []
        for function, args, kwargs, outputs in reversed(self._tape):
            if any(_storage(out) in needed for out in outputs):
                part.append((function, args, kwargs, outputs))
                inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
                needed.update(_storage(leaf) for leaf in inputs if leaf.device.type == "meta")
        return part[::-1], needed


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _loops(view: Tensor, strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Loops (size, step in the source, step in the target) over the elements of a view that come to lie with these
    strides: as few as possible, the largest steps of the target first."""
    loops: list[tuple[int, int, int]] = []
    given = (loop for loop in zip(view.shape, view.stride(), strides) if loop[0] != 1)
    for size, source, target in sorted(given, key=lambda loop: loop[2], reverse=True):
        if loops and loops[-1][1:] == (size * source, size * target):
            loops[-1] = (loops[-1][0] * size, source, target)
        else:
            loops.append((size, source, target))
    return loops


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Joins runs that continue one another. They are then in the order of the target."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.target):
        name, source, target, numel = joined[-1] if joined else ("", 0, 0, 0)
        if joined and (name, source + numel, target + numel) == run[:3]:
            joined[-1] = Run(name, source, target, numel + run.numel)
        else:
            joined.append(run)
    return joined


def _dim_of(out: Tensor, args, kwargs) -> int:
    """The dimension along which `cat` and `stack` lay their inputs."""
    return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()


def _with_dim(tensor: Tensor, dim: int) -> Tensor:
    """Returns `tensor.unsqueeze(dim)`."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    shape.insert(dim, 1)
    strides.insert(dim, 1)
    return tensor.as_strided(shape, strides, tensor.storage_offset())


def _is_copy_by_parts(function, args, kwargs, outputs: list[Tensor]) -> bool:
    """Whether an operation copies each part along the first dimension by itself, if its tensors are so divided."""
    packet = function.overloadpacket
    return packet in _CLONES or (packet is torch.ops.aten.cat and _dim_of(outputs[0], args, kwargs) > 0)


def _divides(tensor: Tensor, count: int) -> bool:
    """Whether a tensor's parts along its first dimension lie in one part each of its storage."""
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:])
    )
    is_stacked = tensor.dim() > 1 and tensor.shape[0] == count and tensor.stride(0) * count == numel
    return is_stacked and last < tensor.stride(0)


def _real(tree, held: Mapping[int, Tensor], num_parts: int | None = None):
    """Returns the arguments with data: every view is taken from the real storage, every device is where that lies."""

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
