"""Lazy loading: `from_pretrained` reads only the headers of the files, and the weights stay there.

Two static methods of `PreTrainedModel` are replaced while it runs, in this thread only. The method that reads files
into a model receives tensors without data, and the resulting sources are recorded on the parameters.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.conversion import Converter, Origin, traced_headers
from hf_zero.checkpoint.files import PIECE_NBYTES, OpenFiles
from hf_zero.checkpoint.format import FileLayout, TensorEntry, WeightFiles
from hf_zero.checkpoint.names import shortened
from hf_zero.compat import override
from hf_zero.engine.source import set_source, source_of
from hf_zero.errors import CheckpointError


# The replaced methods of `PreTrainedModel`.
_REPLACED = ("_load_pretrained_model", "_finalize_model_loading")
_lock = threading.RLock()


@dataclass(frozen=True)
class FileSource:
    """The source of a parameter's values in files, see `hf_zero.engine.source.Source`."""

    files: "StoredFiles | MappedTensors"  # shared by all parameters of the model
    origin: Origin  # the parameter's source tensors in the files
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which the model was loaded

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        with self.files.open() as opened:
            if dtype is self.dtype is out.dtype:
                self.origin.read(opened.read_range, start, out)
                return
            piece_numel = PIECE_NBYTES // self.dtype.itemsize
            if self.origin.start is None:  # otherwise it would be converted again for each piece
                piece_numel = max(1, out.numel())
            for first in range(0, out.numel(), piece_numel):
                piece = out[first : first + piece_numel]
                values = torch.empty(piece.numel(), dtype=self.dtype)
                self.origin.read(opened.read_range, start + first, values)
                piece.copy_(values.to(dtype))  # differs if the model was cast after loading


class StoredFiles:
    """Safetensors files whose headers were read. They are opened again for each parameter. If a tensor is in several
    files, the last one counts, as in transformers."""

    def __init__(self, paths: Sequence[str]):
        layouts = {str(path): FileLayout.read(path) for path in paths}
        file_of = {name: path for path, layout in layouts.items() for name in layout.entries}
        self._files = WeightFiles(layouts, file_of, None)
        self._states = {path: _state_of(path) for path in layouts}
        self.entries = self._files.entries

    def open(self) -> OpenFiles:
        """Opens the files for reading. Raises [`CheckpointError`] if a file has changed since its header was read."""
        for path, state in self._states.items():
            if _state_of(path) != state:
                raise CheckpointError(
                    f"{path}: was changed or removed after the model was loaded and before it was sharded; load the "
                    "model again"
                )
        return OpenFiles(Path(), self._files)


class MappedTensors:
    """The tensors of pickled files, from `torch.load(mmap=True)`, with the methods of `OpenFiles`."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.entries = {name: TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()}

    def open(self) -> AbstractContextManager["MappedTensors"]:
        return nullcontext(self)

    def read_range(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self._tensors[name].reshape(-1)[start : start + out.numel()])


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


@contextmanager
def lazy_loading(allow_missing: Sequence[str]) -> Iterator[None]:
    """Makes `from_pretrained` leave weights in their files, in this thread and inside the context. For `allow_missing`
    see `load_pretrained`. Raises [`ConfigError`] if the installed transformers lacks a replaced method or a parameter
    of it."""
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    thread = threading.get_ident()
    models: list[nn.Module] = []  # models whose weights are in files

    def load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None, **kwargs):
        placed = load_config.device_map is not None or load_config.is_quantized or expected_keys is not None
        is_ours = threading.get_ident() == thread and state_dict is None and not placed
        files = _open(checkpoint_files) if is_ours else None
        if files is None:
            return load(model, state_dict, checkpoint_files, load_config, expected_keys=expected_keys, **kwargs)
        models.append(model)
        return _load_headers(partial(load, **kwargs), model, files, load_config)

    def finalize_model_loading(model, load_config, loading_info, **kwargs):
        if not any(model is known for known in models):
            return finalize(model, load_config, loading_info, **kwargs)
        _refuse_what_does_not_fit(load_config, loading_info)
        _tie_what_is_equal(model, loading_info.missing_keys)
        loading_info = finalize(model, load_config, loading_info, **kwargs)
        _refuse_incomplete(model, load_config, loading_info, allow_missing)
        return loading_info

    with _lock:
        load, finalize = (getattr(base, name, None) for name in _REPLACED)
        ours = zip(_REPLACED, (load_pretrained_model, finalize_model_loading))
        adapted: dict[str, Any] = {name: staticmethod(override(fn, base, name)) for name, fn in ours}
        with mock.patch.multiple(base, **adapted):
            yield


def _open(paths: Sequence[str] | None) -> StoredFiles | MappedTensors | None:
    """Opens the files lazily, or returns `None` if transformers has to read them."""
    if not paths:
        return None
    if all(str(path).endswith(".safetensors") for path in paths):
        return StoredFiles(paths)
    tensors: dict[str, Any] = {}
    try:
        for path in paths:
            tensors.update(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except (RuntimeError, UnpicklingError):  # an old format without mmap, or objects other than tensors
        return None
    return MappedTensors(tensors) if all(isinstance(tensor, Tensor) for tensor in tensors.values()) else None


def _load_headers(load, model: nn.Module, files: StoredFiles | MappedTensors, load_config) -> tuple:
    """Makes transformers load tensors without data, and attaches the source to each parameter."""
    with traced_headers(files.entries) as (trace, headers):
        result = load(model, headers, None, replace(load_config, device_map={"": "meta"}))
    converter = Converter(model, load_config.weight_mapping or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or not trace.knows(tensor):
            continue
        origin = trace.origin_of(tensor, partial(converter.converted, name))
        source = FileSource(files, origin, tuple(tensor.shape), tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            set_source(tensor, source)
        else:
            _read_buffer(model, name, tensor, source)
    return result


def _read_buffer(model: nn.Module, name: str, buffer: Tensor, source: FileSource) -> None:
    """Reads a buffer, which is small and replicated on every rank."""
    values = torch.empty(buffer.shape, dtype=buffer.dtype)
    source.read(0, values.view(-1), buffer.dtype)
    values._is_hf_initialized = True  # prevents initialization by transformers
    path, _, own = name.rpartition(".")
    model.get_submodule(path)._buffers[own] = values


def _refuse_what_does_not_fit(load_config, loading_info) -> None:
    where = load_config.pretrained_model_name_or_path
    for key, error in loading_info.conversion_errors.items():
        raise CheckpointError(
            f"{where}: the tensors of {key} cannot be converted ({error.strip().splitlines()[-1]}); "
            "use a checkpoint of this model"
        )
    if loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        key, found, wanted = sorted(loading_info.mismatched_keys)[0]
        more = f" and {len(loading_info.mismatched_keys) - 1} more" if len(loading_info.mismatched_keys) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {key!r} has shape {list(found)}, the model's has {list(wanted)}{more}; load with the "
            "config saved beside it, or pass ignore_mismatched_sizes=True to initialize mismatched tensors"
        )


def _tie_what_is_equal(model: nn.Module, missing: set[str]) -> None:
    """Ties parameters that are stored twice with equal values. transformers cannot compare them, since the values are
    still in files."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        first, second = model.get_parameter(source), model.get_parameter(target)
        if first is second or source_of(first) is None or source_of(second) is None:
            continue
        if _are_equal(first, second):
            path, _, own = target.rpartition(".")
            model.get_submodule(path)._parameters[own] = first
        else:
            model.all_tied_weights_keys.pop(target)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    piece_numel = 2**20
    for start in range(0, first.numel(), piece_numel):
        values = torch.empty(2, min(piece_numel, first.numel() - start), dtype=first.dtype)
        for row, param in zip(values, (first, second)):
            source = source_of(param)
            assert source is not None, "only parameters in files are compared"
            source.read(start, row, param.dtype)
        if not torch.equal(*values):
            return False
    return True


def _refuse_incomplete(model: nn.Module, load_config, loading_info, allowed: Sequence[str]) -> None:
    """Raises if tensors of the base model are missing. A missing head is initialized."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    lost = sorted(
        key
        for key in loading_info.missing_keys
        if key.startswith(prefix) and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    )
    if lost:
        raise CheckpointError(
            f"{load_config.pretrained_model_name_or_path}: {len(lost)} tensors of the base model are missing "
            f"({shortened(lost)}); pass a checkpoint of this model, or allow their initialization with "
            f"allow_missing=[{lost[0].rpartition('.')[0]!r}]"
        )
