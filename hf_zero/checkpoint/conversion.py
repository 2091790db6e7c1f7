"""Conversion between the tensors of a model and those of its files.

In some models the weights have another layout than in their checkpoints: stacked experts, split projections,
transposed matrices. transformers has a converter for each, and renames all other tensors. Tensors that are only
renamed, or are a contiguous range of another tensor, are read and written in ranges. For all others, the converter
runs on full tensors, one conversion at a time.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.names import SavedTensor, named_tensors
from hf_zero.checkpoint.safetensors import TensorEntry
from hf_zero.compat import is_pretrained
from hf_zero.errors import CheckpointError


ReadRange = Callable[[str, int, Tensor], None]  # (name, first element, out): fills the 1-D tensor `out`


@dataclass(frozen=True)
class Conversion:
    """One use of a converter of transformers. Its sources are tensors of files when loading; and parameters and
    buffers, by `SavedTensor.name`, when saving."""

    converter: Any  # transformers' `WeightConverter`
    layer: str  # transformers' name for the results
    sources: tuple[tuple[TensorEntry, str], ...]  # each with the pattern that its name matches
    model: Any  # has the config, and the shapes of parameters
    renamed: Callable[[str], str] = str  # the final name of a result

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts the full source tensors. Returns the results by name."""
        converter = copy.deepcopy(self.converter)
        for entry, pattern in self.sources:
            converter.add_tensor(self.layer, entry.name, pattern, tensors[entry.name])
        found = converter.convert(self.layer, model=self.model, config=self.model.config)
        return {self.renamed(name): each[0] if isinstance(each, list) else each for name, each in found.items()}

    def results(self) -> list[tuple[TensorEntry, "Origin"]]:
        """Returns the results and their origins, found by a run without data."""
        sources = tuple(entry for entry, _ in self.sources)
        tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in sources}
        source_of = {_storage(tensors[entry.name]): entry for entry in sources}
        # other operations may write into a view
        keeps_values = all(type(op).__module__.startswith("transformers.") for op in self.converter.operations)
        found = []
        for name, tensor in self.run(tensors).items():
            entry, source = TensorEntry(name, tensor.dtype, tuple(tensor.shape)), source_of.get(_storage(tensor))
            is_range = source is not None and source.dtype is tensor.dtype and tensor.is_contiguous()
            if source is not None and is_range and keeps_values:
                found.append((entry, Origin((source,), tensor.storage_offset())))
            else:
                found.append((entry, Origin(sources, None, self, name)))
        return found


@dataclass(frozen=True)
class Origin:
    """The sources of a tensor: those of its conversion, or one tensor of which it is a range."""

    sources: tuple[TensorEntry, ...]
    start: int | None = 0  # the tensor's first element in its only source; None if it is converted
    conversion: Conversion | None = None
    name: str = ""  # among the results of the conversion

    def read(self, read_range: ReadRange, start: int, out: Tensor) -> None:
        """Fills the 1-D tensor `out` with elements of the flattened tensor, starting at `start`."""
        if self.start is not None:
            read_range(self.sources[0].name, self.start + start, out)
            return
        assert self.conversion is not None, "without a conversion, it is a range"
        values = {}
        for entry in self.sources:  # transformers, too, converts in the final dtype
            dtype = out.dtype if entry.dtype.is_floating_point else entry.dtype
            values[entry.name] = torch.empty(entry.shape, dtype=dtype)
            read_range(entry.name, 0, values[entry.name].view(-1))
        out.copy_(self.conversion.run(values)[self.name].reshape(-1)[start : start + out.numel()])


@dataclass(frozen=True)
class Origins:
    """The origins of a model's tensors, and the tensors of the model or the files without a counterpart."""

    of: Mapping[str, Origin]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # name, shape found, shape expected


def file_tensors(model: nn.Module | None, tensors: Sequence[SavedTensor]) -> dict[TensorEntry, Origin]:
    """Returns the tensors that `model.save_pretrained` would write, in its order. Without a model, returns `tensors`
    under their keys. Raises [`CheckpointError`] for duplicate names."""
    twice = [key for key, count in Counter(saved.key for saved in tensors).items() if count > 1]
    if twice:
        raise CheckpointError(f"tensor {twice[0]!r} appears twice; use a unique name for each tensor")
    reversed_ = _reversed_conversions(model) if model is not None and is_pretrained(model) else None
    if reversed_ is None:
        return {saved.entry: Origin((replace(saved.entry, name=saved.name),)) for saved in tensors}
    from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

    renamings, converters, converter_of = _divided(reversed_)
    groups: dict[str, list[tuple[TensorEntry, str]]] = {}  # in the order of transformers
    for saved in sorted(tensors, key=lambda saved: dot_natural_key(saved.key)):
        name, pattern = apply_converters(saved.key, converters)
        name = apply_renamings(saved.key, renamings) if pattern is None else name
        groups.setdefault(name, []).append((replace(saved.entry, name=saved.name), pattern or ""))
    content: dict[TensorEntry, Origin] = {}
    for name, sources in groups.items():
        (entry, pattern), *_ = sources
        if not pattern:
            content[replace(entry, name=name)] = Origin((entry,))
        else:
            rename = partial(apply_renamings, weight_renamings=renamings)
            conversion = Conversion(converter_of[pattern], name, tuple(sources), model, rename)
            content.update(conversion.results())
    return content


def _reversed_conversions(model: Any) -> list | None:
    """Returns the conversions that transformers applies when it saves a model, or `None`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    known = getattr(model, "_weight_conversions", None)
    if known is None:  # not loaded with from_pretrained
        found = get_model_conversion_mapping(model, add_legacy=False)
        known = [each for each in found if not isinstance(each, PrefixChange)] or None
    return None if known is None else [each.reverse_transform() for each in known[::-1]]


def _divided(conversions: Sequence[Any]) -> tuple[list, list, dict[str, Any]]:
    """Divides conversions into renamings and converters, and returns the converter of each pattern, too."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return [each for each in conversions if isinstance(each, WeightRenaming)], converters, converter_of


def origins_in(model: Any, entries: Mapping[str, TensorEntry], conversions: Sequence[Any]) -> Origins:
    """Finds the sources of each parameter and persistent buffer of a model in the files, as `from_pretrained` does.
    Parameters may be placeholders, since only shapes are needed. Raises [`CheckpointError`] if transformers cannot
    convert these tensors to the model's."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    held = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named_tensors(model)}
    stand_in = SimpleNamespace(config=model.config, get_parameter=held.__getitem__)  # the model itself may change
    renamings, converters, converter_of = _divided(conversions)
    unexpected: list[str] = []
    found: list[tuple[TensorEntry, Origin]] = []
    groups: dict[str, list[tuple[TensorEntry, str]]] = {}
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
        if name not in held and key in held:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, held)
        if pattern is not None and name in held:
            groups.setdefault(name, []).append((entries[key], pattern))
        elif pattern is not None:
            first, *_ = targets = converter_of[pattern].target_patterns
            unexpected += [name.replace(first, target) for target in targets]
        else:
            found.append((replace(entries[key], name=name), Origin((entries[key],))))
    for name, sources in groups.items():
        conversion = Conversion(converter_of[sources[0][1]], name, tuple(sources), stand_in)
        try:
            found += conversion.results()
        except Exception as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{name}: the checkpoint's tensors cannot be converted ({reason}); use a checkpoint of this model"
            ) from error
    return _matched({name: tuple(t.shape) for name, t in held.items()}, found, unexpected)


def _matched(
    held: Mapping[str, tuple[int, ...]], found: Sequence[tuple[TensorEntry, Origin]], unexpected: Sequence[str]
) -> Origins:
    origins: dict[str, Origin] = {}
    mismatched = {}
    unknown = set(unexpected)
    for entry, origin in found:
        if entry.name not in held:
            unknown.add(entry.name)
        elif entry.shape != held[entry.name]:
            mismatched[entry.name] = entry.name, entry.shape, held[entry.name]
        else:
            origins.setdefault(entry.name, origin)
    missing = tuple(name for name in held if name not in origins and name not in mismatched)
    return Origins(origins, missing, tuple(sorted(unknown)), tuple(sorted(mismatched.values())))


def origins_of(tensors: Sequence[SavedTensor], model: Any | None, entries: Mapping[str, TensorEntry]) -> Origins:
    """Finds the sources of saved tensors by `SavedTensor.name`. Without a model, the files have the tensors' own names
    or keys. Raises as `origins_in`."""
    if model is not None:
        all_found = origins_in(model, entries, _conversions_of(model))
    else:
        held = {name: saved.shape for saved in tensors for name in (saved.name, *saved.aliases, saved.key)}
        all_found = _matched(held, [(entry, Origin((entry,))) for entry in entries.values()], ())
    found, missing = {}, []
    unplaced = {name for name, *_ in all_found.mismatched}
    for saved in tensors:
        names = dict.fromkeys((saved.key, saved.name, *saved.aliases))
        origin = next((all_found.of[name] for name in names if name in all_found.of), None)
        if origin is not None:
            found[saved.name] = origin
        elif unplaced.isdisjoint(names):
            missing.append(saved.key)
    return replace(all_found, of=found, missing=tuple(missing))


def _conversions_of(model: nn.Module) -> list:
    """Returns the conversions of a model's class, and those that the user passed when loading it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model)
    patterns = {(tuple(found._original_source_patterns), tuple(found._original_target_patterns)) for found in known}
    used = [
        found
        for found in getattr(model, "_weight_conversions", None) or ()
        if (tuple(found._original_source_patterns), tuple(found._original_target_patterns)) not in patterns
    ]
    return copy.deepcopy(used + known)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
