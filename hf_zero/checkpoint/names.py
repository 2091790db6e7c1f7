"""The tensors of a model and those of its files: the names that transformers writes, and how each side is made of the
other.

Some models hold their weights otherwise than their checkpoints do: experts stacked, projections split, matrices
transposed. transformers converts on load and reverts on save; its own code runs here on tensors without data. Where it
only moves runs of elements, every rank reads and writes those that it holds. The rest is computed from whole tensors.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.format import TensorEntry
from hf_zero.checkpoint.trace import Computation, ReadRange, Run, Trace, within
from hf_zero.compat import is_pretrained
from hf_zero.engine import ParamInfo
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of a model, with its names."""

    name: str  # the engine's name of the parameter, or the first name of the buffer
    key: str  # in files that are written here
    aliases: tuple[str, ...]  # every name that it has in the model: more than one when it is tied
    dtype: torch.dtype  # as saved
    shape: tuple[int, ...]  # of the whole tensor
    buffer: Tensor | None = None  # whole on every rank; None for a parameter

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.key, self.dtype, self.shape)

    def fill_buffer(self, read: Callable[[Tensor], None]) -> None:
        """Overwrites the buffer with what `read` puts into a 1-D tensor, also a buffer that is not contiguous."""
        assert self.buffer is not None, f"{self.name} is a parameter"
        flat = self.buffer.new_empty(self.buffer.numel())
        read(flat)
        self.buffer.copy_(flat.view(self.shape))


def saved_tensors(model: nn.Module, parameters: Sequence[ParamInfo]) -> list[SavedTensor]:
    """Returns the tensors of a model folder, in the order of `model.state_dict()`.

    Tied tensors appear once, under the name that the model's class declares as the source of the tie (its first name
    where nothing is declared). Buffers that the model does not persist and keys that it asks to leave out are absent.
    Parameters may be placeholders: identities and names count, no value is read.
    """
    info_of = {info.name: info for info in parameters}
    tie_targets = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named = dict(named_tensors(model))
    names_of: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names_of.setdefault(id(tensor), []).append(name)
    tensors = []
    for key, tensor in named.items():
        aliases = tuple(names_of[id(tensor)])
        info = next((info_of[alias] for alias in aliases if alias in info_of), None)
        is_parameter = isinstance(tensor, nn.Parameter)
        if (is_parameter and info is None) or left_out.intersection(aliases):
            continue
        if key != next((alias for alias in aliases if alias not in tie_targets), aliases[0]):
            continue
        if info is not None:
            tensors.append(SavedTensor(info.name, key, aliases, info.save_dtype, tuple(info.shape)))
        else:
            tensors.append(SavedTensor(key, key, aliases, tensor.dtype, tuple(tensor.shape), tensor.detach()))
    return tensors


def renamed(tensors: Sequence[SavedTensor], keys: Mapping[str, str | Sequence[str]]) -> list[SavedTensor]:
    """Returns the tensors that have a name in `keys`, under the key given there. Other keys and names are aliases."""
    chosen = []
    for saved in tensors:
        given: list[str] = []
        for name in dict.fromkeys((saved.name, *saved.aliases)):
            found = keys.get(name, ())
            given += [found] if isinstance(found, str) else found
        if given:
            chosen.append(replace(saved, key=given[0], aliases=(*saved.aliases, *given[1:])))
    return chosen


def shortened(names: Collection[str]) -> str:
    """Returns a list of names for a message: the first five, and how many more there are."""
    return ", ".join(list(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers under all their names, in the order of the state dict."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{dot}{name}", parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}{dot}{name}", buffer


@dataclass(frozen=True)
class Origin:
    """The tensors from which a tensor is made: those of files for a parameter, or parameters and buffers, by the name
    of the `SavedTensor`, for a tensor of a file."""

    runs: Sequence[Run]
    computation: Computation | None = None  # in place of runs

    def read(self, read_range: ReadRange, start: int, out: Tensor) -> None:
        """Fills `out`, 1-D, with the elements of the flattened tensor from `start` on."""
        if self.computation is not None:
            for first, values in self.computation.read(read_range, start, start + out.numel()):
                out[first - start :][: values.numel()].copy_(values)
            return
        for run in within(self.runs, start, start + out.numel()):
            read_range(run.name, run.source, out[run.target - start :][: run.numel])


@dataclass(frozen=True)
class Origins:
    """The origins of a model's tensors in files, by the name of the `SavedTensor`, and the tensors without a partner
    on either side."""

    of: Mapping[str, Origin]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # key, shape found, shape expected


def file_tensors(model: nn.Module | None, tensors: Sequence[SavedTensor]) -> dict[TensorEntry, Origin]:
    """Returns the tensors that `model.save_pretrained` would write, in its order; without a model, under their keys.
    Parameters may be placeholders: only shapes are looked at. Raises [`CheckpointError`] for two tensors of one
    name."""
    twice = [key for key, count in Counter(saved.key for saved in tensors).items() if count > 1]
    if twice:
        raise CheckpointError(f"tensor {twice[0]!r} is given twice; give every tensor its own name")
    trace = Trace()
    state = {saved.key: trace.new(saved.name, saved.shape, saved.dtype) for saved in tensors}
    if model is not None and is_pretrained(model):
        from transformers.core_model_loading import revert_weight_conversion

        with trace:
            state = revert_weight_conversion(model, state)
    return {
        TensorEntry(key, tensor.dtype, tuple(tensor.shape)): origin_of(trace, tensor) for key, tensor in state.items()
    }


def origins_in(model: nn.Module, tensors: Sequence[SavedTensor], entries: Mapping[str, TensorEntry]) -> Origins:
    """Finds the tensors of a folder from which each tensor of a model is made, as `from_pretrained` would make it.
    Parameters may be placeholders: only shapes are looked at. Raises [`CheckpointError`] where transformers cannot
    convert these tensors into the model's."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    meta_copy = MetaCopy(model)
    config = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=_conversions_of(model))
    with traced_headers(entries) as (trace, headers):
        info, _ = convert_and_load_state_dict_in_model(meta_copy, headers, config)
    for key, error in info.conversion_errors.items():
        raise CheckpointError(
            f"{key}: the checkpoint's tensors cannot be converted ({error.strip().splitlines()[-1]}); "
            "use a checkpoint of this model"
        )
    held = meta_copy.state_dict(keep_vars=True)
    found, missing = {}, []
    for saved in tensors:
        names = [name for name in (saved.key, saved.name, *saved.aliases) if name in held and trace.knows(held[name])]
        if names:
            found[saved.name] = origin_of(trace, held[names[0]])
        else:
            missing.append(saved.key)
    mismatched = tuple((key, tuple(was), tuple(wanted)) for key, was, wanted in sorted(info.mismatched_keys))
    unplaced = {key for key, *_ in mismatched}
    absent = tuple(key for key in missing if key not in unplaced)
    return Origins(found, absent, tuple(sorted(info.unexpected_keys)), mismatched)


def origins_by_name(tensors: Sequence[SavedTensor], entries: Mapping[str, TensorEntry]) -> Origins:
    """Finds origins as `origins_in` does, for tensors that lie under the model's own names or those given to them."""
    found, missing, known, mismatched = {}, [], set(), []
    for saved in tensors:
        names = [name for name in (saved.key, saved.name, *saved.aliases) if name in entries]
        known.update(names)
        if not names:
            missing.append(saved.key)
        elif entries[names[0]].shape != saved.shape:
            mismatched.append((names[0], entries[names[0]].shape, saved.shape))
        else:
            found[saved.name] = Origin((Run(names[0], 0, 0, saved.entry.numel),))
    unexpected = tuple(name for name in entries if name not in known)
    return Origins(found, tuple(missing), unexpected, tuple(mismatched))


def origin_of(trace: Trace, tensor: Tensor) -> Origin:
    """Returns the origin of a traced tensor."""
    runs = trace.runs_of(tensor)
    return Origin((), trace.computation_of(tensor)) if runs is None else Origin(runs)


def _conversions_of(model: nn.Module) -> list:
    """The conversions of a model's class, and those that the user gave when it was loaded."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model)
    patterns = {(tuple(found._original_source_patterns), tuple(found._original_target_patterns)) for found in known}
    used = [
        copy.deepcopy(found)
        for found in getattr(model, "_weight_conversions", None) or ()
        if (tuple(found._original_source_patterns), tuple(found._original_target_patterns)) not in patterns
    ]
    return used + known


class Header:
    """Stands for a tensor of a file where transformers loads, and expects an object that is read when it is sliced."""

    def __init__(self, trace: Trace, entry: TensorEntry):
        self._trace = trace
        self._entry = entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def __getitem__(self, what) -> "Header":
        if what is not Ellipsis:
            raise NotImplementedError(f"{self._entry.name}: a part of a tensor was asked for, expected the whole")
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._trace.new(self._entry.name, self._entry.shape, dtype or self._entry.dtype)


@contextmanager
def traced_headers(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[Trace, dict[str, Header]]]:
    """Gives what transformers loads in place of the tensors of files while the context lasts, and follows what it does
    with them. Its progress bars are hidden, since no weights are read yet."""
    from transformers.utils import logging

    trace = Trace()
    former = logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    try:
        with trace:
            yield trace, {name: Header(trace, entry) for name, entry in entries.items()}
    finally:
        logging.set_tqdm_hook(former)


class MetaCopy(nn.Module):
    """A copy of a model's tree of modules with parameters and buffers on the meta device, which shares everything
    else."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.__dict__["_original"] = model
        _copy_tree(model, self, {id(model): self}, {})

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def _copy_tree(module: nn.Module, new: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, Tensor]) -> None:
    for name, p in module._parameters.items():
        if p is not None and id(p) not in tensors:
            tensors[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False)
        new._parameters[name] = None if p is None else tensors[id(p)]
    for name, buffer in module._buffers.items():
        new._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")
    new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        if child is not None and id(child) not in modules:
            modules[id(child)] = nn.Module()
            _copy_tree(child, modules[id(child)], modules, tensors)
        new._modules[name] = None if child is None else modules[id(child)]
