"""Conversion between the tensors of a model and those of its files.

In some models the weights have another layout than in their checkpoints: stacked experts, split projections,
transposed matrices. transformers converts them on load and reverts the conversion on save. Its code first runs on
tensors without data, which shows the sources of each tensor. A tensor that is a contiguous range of another one is
read and written in ranges. Other tensors are gathered and converted by the same code.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.checkpoint.format import TensorEntry
from hf_zero.checkpoint.names import SavedTensor
from hf_zero.compat import is_pretrained
from hf_zero.errors import CheckpointError


ReadRange = Callable[[str, int, Tensor], None]  # (name, first element, out): fills the 1-D tensor `out`
Convert = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]  # (values by name, dtype of the result)


@dataclass(frozen=True)
class Origin:
    """The sources of a tensor: tensors of files for a parameter; or parameters and buffers, by `SavedTensor.name`, for
    a tensor of a file."""

    sources: tuple[TensorEntry, ...]
    start: int | None  # the tensor's first element in its only source; None if it is converted
    convert: Convert | None = None  # conversion of a parameter

    def read(self, read_range: ReadRange, start: int, out: Tensor) -> None:
        """Fills the 1-D tensor `out` with elements of the flattened tensor, starting at `start`."""
        if self.start is not None:
            read_range(self.sources[0].name, self.start + start, out)
            return
        assert self.convert is not None, "only parameters are read"
        values = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in self.sources}
        for name, tensor in values.items():
            read_range(name, 0, tensor.view(-1))
        out.copy_(self.convert(values, out.dtype).reshape(-1)[start : start + out.numel()])


@dataclass(frozen=True)
class Origins:
    """The origins of a model's tensors by `SavedTensor.name`, and the tensors of the model or the files without a
    counterpart."""

    of: Mapping[str, Origin]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # key, shape found, shape expected


def file_tensors(model: nn.Module | None, tensors: Sequence[SavedTensor]) -> dict[TensorEntry, Origin]:
    """Returns the tensors that `model.save_pretrained` would write, in its order. Without a model, returns `tensors`
    under their keys. Parameters may be placeholders, since only shapes are needed. Raises [`CheckpointError`] for
    duplicate names."""
    twice = [key for key, count in Counter(saved.key for saved in tensors).items() if count > 1]
    if twice:
        raise CheckpointError(f"tensor {twice[0]!r} appears twice; use a unique name for each tensor")
    trace = Trace()
    state = {saved.key: trace.new(replace(saved.entry, name=saved.name), saved.dtype) for saved in tensors}
    if model is not None and is_pretrained(model):
        with trace:
            state = reverted(model, state)
    return {TensorEntry(key, each.dtype, tuple(each.shape)): trace.origin_of(each) for key, each in state.items()}


def reverted(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reverts transformers' weight conversion: returns the tensors that it would write for this state, by key."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(state))


def origins_in(model: nn.Module, tensors: Sequence[SavedTensor], entries: Mapping[str, TensorEntry]) -> Origins:
    """Finds the sources of each tensor of a model in the files, according to the conversions of `from_pretrained`.
    Parameters may be placeholders, since only shapes are needed. Raises [`CheckpointError`] if transformers cannot
    convert these tensors to the model's."""
    mapping = _conversions_of(model)
    meta_copy = MetaCopy(model)
    with traced_headers(entries) as (trace, headers):
        info = _load(meta_copy, headers, "meta", mapping)
    _refuse_errors(info)
    held = meta_copy.state_dict(keep_vars=True)
    converter = Converter(model, mapping)
    found, missing = {}, []
    for saved in tensors:
        names = [name for name in (saved.key, saved.name, *saved.aliases) if name in held and trace.knows(held[name])]
        if names:
            found[saved.name] = trace.origin_of(held[names[0]], partial(converter.converted, names[0]))
        else:
            missing.append(saved.key)
    mismatched = tuple((key, tuple(was), tuple(wanted)) for key, was, wanted in sorted(info.mismatched_keys))
    unplaced = {key for key, *_ in mismatched}
    absent = tuple(key for key in missing if key not in unplaced)
    return Origins(found, absent, tuple(sorted(info.unexpected_keys)), mismatched)


def origins_by_name(tensors: Sequence[SavedTensor], entries: Mapping[str, TensorEntry]) -> Origins:
    """Finds origins like `origins_in`, for files whose tensors have the model's own names or the given keys."""
    found, missing, known, mismatched = {}, [], set(), []
    for saved in tensors:
        names = [name for name in (saved.key, saved.name, *saved.aliases) if name in entries]
        known.update(names)
        if not names:
            missing.append(saved.key)
        elif entries[names[0]].shape != saved.shape:
            mismatched.append((names[0], entries[names[0]].shape, saved.shape))
        else:
            found[saved.name] = Origin((entries[names[0]],), 0)
    unexpected = tuple(name for name in entries if name not in known)
    return Origins(found, tuple(missing), unexpected, tuple(mismatched))


class Converter:
    """Converts tensors of files to those of a model one at a time, with transformers' own code."""

    def __init__(self, model: nn.Module, mapping: Sequence):
        self._model = MetaCopy(model)  # a copy, since the model may be changed before its weights are read
        self._mapping = mapping

    def converted(self, name: str, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Converts the values of all sources to the tensor `name` of the model's state."""
        model = MetaCopy(self._model, dtype)
        with _without_progress_bars():
            _refuse_errors(_load(model, values, "cpu", self._mapping))
        return model.state_dict()[name]


def _load(model: nn.Module, state: Mapping[str, Any], device: str, mapping: Sequence):
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(device_map={"": device}, weight_mapping=copy.deepcopy(list(mapping)))
    info, _ = convert_and_load_state_dict_in_model(model, dict(state), config)
    return info


def _refuse_errors(info) -> None:
    for key, error in info.conversion_errors.items():
        raise CheckpointError(
            f"{key}: the checkpoint's tensors cannot be converted ({error.strip().splitlines()[-1]}); "
            "use a checkpoint of this model"
        )


def _conversions_of(model: nn.Module) -> list:
    """Returns the conversions of a model's class, and those that the user passed when loading it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model)
    patterns = {(tuple(found._original_source_patterns), tuple(found._original_target_patterns)) for found in known}
    used = [
        copy.deepcopy(found)
        for found in getattr(model, "_weight_conversions", None) or ()
        if (tuple(found._original_source_patterns), tuple(found._original_target_patterns)) not in patterns
    ]
    return used + known


class Trace(TorchDispatchMode):
    """Tracks from which tensors of `new` other tensors are computed, in this thread and inside the context."""

    def __init__(self):
        super().__init__()
        self._roots: dict[int, tuple[TensorEntry, torch.dtype]] = {}  # by storage, until it is written to
        self._sources: dict[int, frozenset[TensorEntry]] = {}  # by storage
        self._kept: list[Tensor] = []  # keeps storages alive, so that their addresses stay unique

    def new(self, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
        """Creates a meta tensor that represents the values of `entry` in a dtype."""
        tensor = torch.empty(entry.shape, dtype=dtype, device="meta")
        self._kept.append(tensor)
        self._roots[_storage(tensor)] = entry, dtype
        self._sources[_storage(tensor)] = frozenset([entry])
        return tensor

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is computed from tensors of `new`."""
        return tensor.device.type == "meta" and bool(self._sources.get(_storage(tensor)))

    def origin_of(self, tensor: Tensor, convert: Convert | None = None) -> Origin:
        """Returns the origin of a tensor. `convert` is used if the tensor is not a range of another one."""
        root, dtype = self._roots.get(_storage(tensor), (None, None))
        if root is not None and tensor.dtype is dtype and tensor.is_contiguous():
            return Origin((root,), tensor.storage_offset())
        sources = sorted(self._sources[_storage(tensor)], key=lambda entry: entry.name)
        return Origin(tuple(sources), None, convert)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func.is_view:
            return outputs  # same storage
        taken = [_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)]
        found = frozenset().union(*(self._sources.get(storage, ()) for storage in taken))
        for leaf in filter(_is_meta, tree_leaves(outputs)):
            self._kept.append(leaf)
            self._sources[_storage(leaf)] = found
            self._roots.pop(_storage(leaf), None)
        return outputs


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Header:
    """Replaces a slice object of safetensors, which transformers expects for each tensor of a file."""

    def __init__(self, trace: Trace, entry: TensorEntry):
        self._trace = trace
        self._entry = entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def __getitem__(self, what) -> "Header":
        if what is not Ellipsis:
            raise NotImplementedError(f"{self._entry.name}: slices of a tensor are not supported")
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._trace.new(self._entry, dtype or self._entry.dtype)


@contextmanager
def traced_headers(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[Trace, dict[str, Header]]]:
    """Yields objects that transformers can load instead of the tensors of files, and the trace of its operations on
    them."""
    trace = Trace()
    with _without_progress_bars(), trace:
        yield trace, {name: Header(trace, entry) for name, entry in entries.items()}


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    former = logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(former)


class MetaCopy(nn.Module):
    """A copy of a model's module tree with parameters and buffers on the meta device, and floating-point ones in
    `dtype` if given. It shares all other attributes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        super().__init__()
        self.__dict__["_original"] = model
        _copy_tree(model, self, {id(model): self}, {}, dtype)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def _copy_tree(
    module: nn.Module,
    new: nn.Module,
    modules: dict[int, nn.Module],
    tensors: dict[int, Tensor],
    dtype: torch.dtype | None,
) -> None:
    def empty(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=wanted, device="meta")

    for name, p in module._parameters.items():
        if p is not None and id(p) not in tensors:
            tensors[id(p)] = nn.Parameter(empty(p), requires_grad=False)
        new._parameters[name] = None if p is None else tensors[id(p)]
    for name, buffer in module._buffers.items():
        new._buffers[name] = None if buffer is None else empty(buffer)
    new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        if child is not None and id(child) not in modules:
            modules[id(child)] = nn.Module()
            _copy_tree(child, modules[id(child)], modules, tensors, dtype)
        new._modules[name] = None if child is None else modules[id(child)]
