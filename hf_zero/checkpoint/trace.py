"""Traces where every element of a converted tensor comes from, by tensors without data.

Conversion code runs as it is, on meta tensors. Views are read off their storage, offset and strides; what makes new
storage out of old (a clone, a concatenation) is written down as rectangular copies. Other operations are kept on a
tape and can be done again, on real values, for as much of it as one result needs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hf_zero.checkpoint.strided import Copy, Dim, Unaligned, compose, contiguous_strides, merged


_CLONES = (torch.ops.aten.clone, torch.ops.aten._to_copy)


class Trace(TorchDispatchMode):
    """Follows operations on the tensors of `new`, in this thread and while the context lasts."""

    def __init__(self):
        super().__init__()
        self._written: dict[int, list[Copy] | None] = {}  # by storage; None: elements were computed, not copied
        self._kept: list[Tensor] = []  # a storage's number is its own as long as it lives
        self._roots: dict[int, tuple[str, Tensor]] = {}
        self._tape: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Makes a tensor without data, under whose name its elements are found again."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._kept.append(tensor)
        self._roots[_storage(tensor)] = (name, tensor)
        self._written[_storage(tensor)] = [Copy(name, 0, 0, merged([Dim(tensor.numel(), 1, 1)]))]
        return tensor

    def knows(self, tensor: Tensor) -> bool:
        """Whether the elements of a tensor come out of tensors of `new`."""
        return tensor.device.type == "meta" and _storage(tensor) in self._written

    def copies_of(self, tensor: Tensor) -> list[Copy]:
        """The copies that make a tensor, laid out row by row, out of tensors of `new`.

        Raises:
            `Unaligned`: when it is not made by copies alone.
        """
        copies = self._composed(tensor, contiguous_strides(tensor.shape), 0)
        if sum(copy.numel for copy in copies) != tensor.numel():
            raise Unaligned
        return copies

    def source(self, name: str) -> Tensor:
        """The tensor of `new` that has this name."""
        return next(tensor for known, tensor in self._roots.values() if known == name)

    def sources_of(self, tensor: Tensor) -> list[str]:
        """Names of all tensors of `new` that a tensor is computed from."""
        needed = self._needed(tensor)[1]
        return [name for storage, (name, _) in self._roots.items() if storage in needed]

    def values_of(self, tensor: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Does the operations again that led to a tensor.

        Args:
            tensor (`Tensor`): without data.
            values (`Mapping[str, Tensor]`): of its `sources_of`, each 1-D and whole; may be written to.

        Returns:
            `Tensor`: with data, row by row.
        """
        tape, needed = self._needed(tensor)
        held = {storage: values[name] for storage, (name, _) in self._roots.items() if storage in needed}
        for function, args, kwargs, outputs in tape:
            real = function(*_real(args, held), **_real(kwargs, held))
            results = [leaf for leaf in tree_flatten(real)[0] if isinstance(leaf, Tensor)]
            for meta, result in zip(outputs, results):
                numel = result.untyped_storage().nbytes() // result.itemsize
                held.setdefault(_storage(meta), result.as_strided((numel,), (1,), 0))
        return _real(tensor, held).contiguous()

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
        try:
            if packet in _CLONES and out.dtype is inputs[0].dtype:
                copies = self._composed(inputs[0], out.stride(), out.storage_offset())
            elif packet is torch.ops.aten.cat:
                copies = self._side_by_side(out, inputs, _dim_of(out, args, kwargs))
            elif packet is torch.ops.aten.stack:
                dim = _dim_of(out, args, kwargs)
                copies = self._side_by_side(out, [_with_dim(tensor, dim) for tensor in inputs], dim)
            else:
                copies = None
        except Unaligned:
            copies = None
        self._written[_storage(out)] = copies

    def _side_by_side(self, out: Tensor, inputs: list[Tensor], dim: int) -> list[Copy]:
        copies, position = [], 0
        for tensor in inputs:
            if tensor.dtype is not out.dtype:
                raise Unaligned
            if tensor.dim() != out.dim():
                continue  # torch passes over an empty vector
            copies += self._composed(tensor, out.stride(), out.storage_offset() + position * out.stride(dim))
            position += tensor.shape[dim]
        return copies

    def _composed(self, view: Tensor, strides: tuple[int, ...], offset: int) -> list[Copy]:
        """The copies by which the elements of a view come to lie with these strides."""
        if not view.numel():
            return []
        written = self._written.get(_storage(view)) if view.device.type == "meta" else None
        if written is None:
            raise Unaligned
        dims = tuple(Dim(*loop) for loop in zip(view.shape, view.stride(), strides) if loop[0] != 1)
        outer = Copy("", view.storage_offset(), offset, dims)
        if len(written) == 1 and _storage(view) in self._roots:
            name = self._roots[_storage(view)][0]
            return [Copy(name, outer.source, offset, merged(dims))]
        return [found for inner in written if (found := compose(inner, outer)) is not None]

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


def _dim_of(out: Tensor, args, kwargs) -> int:
    """The dimension along which `cat` and `stack` lay their inputs."""
    return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()


def _with_dim(tensor: Tensor, dim: int) -> Tensor:
    """Returns `tensor.unsqueeze(dim)`."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    shape.insert(dim, 1)
    strides.insert(dim, 1)
    return tensor.as_strided(shape, strides, tensor.storage_offset())


def _real(tree, held: Mapping[int, Tensor]):
    """Returns the arguments with data: every view is taken from the real storage, every device is where that lies."""

    def value(meta: Tensor) -> Tensor:
        if _storage(meta) not in held:
            return meta
        flat = held[_storage(meta)]
        if flat.dtype is not meta.dtype:
            flat = flat.view(meta.dtype)
        return flat.as_strided(meta.shape, meta.stride(), meta.storage_offset())

    tree = tree_map_only(Tensor, value, tree)
    device = next((flat.device for flat in held.values()), torch.device("cpu"))
    return tree_map_only(torch.device, lambda _: device, tree)
