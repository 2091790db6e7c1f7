"""Checkpoints of `torch.distributed.checkpoint`, and those that Trainer writes with FSDP and alone.

The index `.metadata` says of every tensor which boxes of it lie at which bytes of which file. With FSDP a box is some
rows of a parameter. Trainer writes two such folders, `pytorch_model_fsdp_0` and `optimizer_0`, or with
FULL_STATE_DICT two files of `torch.save`; `get_state_dict` of torch gives one folder with "model" and "optim". A plain
run has its optimizer in one such file, `optimizer.pt`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.folders import is_file_name
from hf_zero.checkpoint.foreign.parts import Box, ForeignState, ForeignTensor
from hf_zero.checkpoint.foreign.trusted import load_bytes, load_index, load_mapped
from hf_zero.errors import CheckpointError


INDEX_NAME = ".metadata"
FSDP_WEIGHTS, FSDP_STATE = "pytorch_model_fsdp", "optimizer"
OPTIMIZER_NAME = "optimizer.pt"  # of a plain Trainer run
WEIGHT_KEYS, STATE_KEYS = ("model",), ("optim", "optimizer")


def fsdp_weights(folder: Path) -> dict[str, ForeignTensor]:
    """Returns the weights of a Trainer run with FSDP, saved in shards or whole."""
    whole = folder / f"{FSDP_WEIGHTS}.bin"
    if not whole.is_file():
        return read_weights(folder / f"{FSDP_WEIGHTS}_0")
    return {name: ForeignTensor.of(value) for name, value in load_mapped(whole).items() if isinstance(value, Tensor)}


def fsdp_state(folder: Path, groups: Sequence[dict]) -> ForeignState:
    """Returns the optimizer state of a Trainer run with FSDP, saved in shards or whole."""
    whole = folder / f"{FSDP_STATE}.bin"
    return full_state(whole, groups) if whole.is_file() else read_state(folder / f"{FSDP_STATE}_0", groups)


def read_weights(folder: Path) -> dict[str, ForeignTensor]:
    """Returns the tensors under "model" by name. Raises [`CheckpointError`] where there is no such folder, no model in
    it, or it is damaged."""
    files = _Folder.read(folder)
    return {
        ".".join(map(str, path)): files.tensor(key) for path, key in files.below(WEIGHT_KEYS) if files.is_tensor(key)
    }


def read_state(folder: Path, groups: Sequence[dict]) -> ForeignState:
    """Returns the state under "optim" or "optimizer" by parameter name, flattened or not. Raises as `read_weights`."""
    files = _Folder.read(folder)
    state: dict[str, dict[str, Any]] = {}
    by_index: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict] = {}
    for path, key in files.below(STATE_KEYS):
        kind, _, names = ".".join(map(str, path)).partition(".")  # the flattened form has both in one part of it
        if kind == "state":
            name, _, state_key = names.rpartition(".")
            state.setdefault(name, {})[state_key] = files.value(key)
        elif kind == "param_groups":
            name, _, setting = names.rpartition(".")
            (by_index if name.isdigit() else settings).setdefault(name, {})[setting] = files.value(key)
    listed = [by_index[index] for index in sorted(by_index, key=int)]
    found = state_by_name(folder, {"state": state, "param_groups": listed}, groups)
    found.settings |= settings
    return found


@dataclass
class _Folder:
    """One folder of a distributed checkpoint, whose index was read."""

    folder: Path
    index: Any
    places: dict[tuple, Any]  # (key, offsets of the chunk) to file and bytes
    last: tuple[tuple, Tensor] | None = None  # the chunk that was read last, until the next one is read
    kinds: dict[Path, bool] = field(default_factory=dict)  # of each file whether it is in safetensors format

    @classmethod
    def read(cls, folder: Path) -> "_Folder":
        path = folder / INDEX_NAME
        if not path.is_file():
            raise CheckpointError(f"{path}: does not exist; copy all files of the checkpoint")
        index = load_index(path)
        return cls(folder, index, {place.key(): info for place, info in index.storage_data.items()})

    def below(self, roots: Sequence[str]) -> Iterator[tuple[tuple, str]]:
        """Yields (path below the root, key of the index) for all entries under one of the roots."""
        paths = self.index.planner_data or {}
        found = False
        for key in self.index.state_dict_metadata:
            path = tuple(paths.get(key) or (key,))
            if len(path) == 1:
                path = tuple(str(path[0]).split(".", 1))
            if path[0] in roots and len(path) > 1:
                found = True
                yield path[1:], key
        if not found:
            raise CheckpointError(
                f"{self.folder}: has nothing under {' or '.join(map(repr, roots))}; "
                'save {"model": ..., "optim": ...} as torch\'s get_state_dict gives them'
            )

    def is_tensor(self, key: str) -> bool:
        return hasattr(self.index.state_dict_metadata[key], "chunks")

    def value(self, key: str) -> Any:
        """Returns a tensor, lazily loaded; or a number or list."""
        if not self.is_tensor(key):
            return self._load(key, None)
        tensor = self.tensor(key)
        return tensor if tensor.shape else self._load(key, ()).item()

    def tensor(self, key: str) -> ForeignTensor:
        record = self.index.state_dict_metadata[key]
        shape = tuple(record.size)
        boxes = []
        for chunk in record.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            self._check_box(key, shape, offsets, sizes)
            boxes.append(Box(offsets, sizes, partial(self._load_box, key, offsets, sizes)))
        return ForeignTensor.build(key, shape, boxes, is_flat=False)

    def _check_box(self, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Checks that a box lies in its tensor, and its bytes in their file."""
        numbers = (*shape, *offsets, *sizes)
        is_box = len(shape) == len(offsets) == len(sizes) and all(type(n) is int and n >= 0 for n in numbers)
        if not is_box or any(first + size > full for first, size, full in zip(offsets, sizes, shape)):
            raise CheckpointError(
                f"{self.folder}: its index has {key} at {list(offsets)} with sizes {list(sizes)}, outside of its "
                f"shape {list(shape)}; copy the checkpoint again"
            )
        numel = math.prod(sizes)
        if numel and numel > (info := self._place(key, offsets)).length:
            raise CheckpointError(
                f"{self.folder}: its index has {numel} elements of {key} in {info.length} bytes; copy the checkpoint "
                "again"
            )

    def _load_box(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        loaded = self._load(key, offsets)
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != sizes:
            found = list(loaded.shape) if isinstance(loaded, Tensor) else type(loaded).__name__
            raise CheckpointError(
                f"{self.folder}: {key} at {list(offsets)} is {found} in its file, its index says {list(sizes)}; copy "
                "the checkpoint again"
            )
        return loaded

    def _load(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        """Reads one chunk or object whole. A chunk is at most what one rank of the saving run held of a tensor."""
        if self.last is not None and self.last[0] == (key, offsets):
            return self.last[1]
        info = self._place(key, offsets)
        path = self.folder / info.relative_path
        with open(path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        loaded = load_bytes(data, f"{path}: {key}")
        self.last = ((key, offsets), loaded)
        return loaded

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        """Returns the file and the bytes of a chunk or object, after checks of both."""
        info = self.places.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{self.folder}: its index has no place for {key}; save the checkpoint again")
        if not is_file_name(info.relative_path) or getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.folder}: {key} lies in {info.relative_path!r}, compressed or outside the folder; "
                "save it with torch's FileSystemWriter and no extensions"
            )
        path = self.folder / info.relative_path
        if self._is_safetensors(path):
            raise CheckpointError(
                f"{path}: is in safetensors format, expected torch.save's; save the checkpoint with torch's "
                "FileSystemWriter and its default serialization_format"
            )
        nbytes = path.stat().st_size if path.is_file() else 0
        bounds = (info.offset, info.length)
        if not all(type(number) is int and number >= 0 for number in bounds) or sum(bounds) > nbytes:
            raise CheckpointError(
                f"{path}: ends inside {key}: it has {nbytes} bytes, the index says {info.length} from {info.offset} "
                "on; it is incomplete, copy it again"
            )
        return info

    def _is_safetensors(self, path: Path) -> bool:
        if path not in self.kinds:
            with suppress(OSError), open(path, "rb") as file:
                start = file.read(9)
                self.kinds[path] = not start.startswith(b"PK") and start[8:] == b"{"  # after the header's length
        return self.kinds.get(path, False)


def full_state(path: Path, groups: Sequence[dict]) -> ForeignState:
    """Returns the optimizer state of a file that holds an optimizer's state dict, with numbered or named
    parameters."""
    return state_by_name(path, load_mapped(path), groups)


def state_by_name(subject: Path, saved: Mapping[str, Any], groups: Sequence[dict]) -> ForeignState:
    """Sorts an optimizer's state dict by parameter name.

    A plain optimizer numbers its parameters through its groups. Trainer makes the same groups from the same model, in
    the model's order, so the numbers are those of this run's groups; shapes are compared when the state is read.

    Args:
        saved (`Mapping`): "state" and "param_groups".
        groups (`Sequence[dict]`): this run's groups, with "param_names".

    Raises:
        `CheckpointError`: it is no state dict, or numbers other parameters than this run has.
    """
    if not {"state", "param_groups"} <= set(saved):
        raise CheckpointError(
            f"{subject}: found {sorted(map(str, saved))[:5]}, wanted state and param_groups; "
            "give the state dict of a torch optimizer"
        )
    names, state = _names(subject, saved["param_groups"], groups), ForeignState()
    for group in saved["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for param in group["params"]:
            state.settings[names.get(param, param)] = settings
    for param, values in saved["state"].items():
        for key, value in values.items():
            state.put(str(names.get(param, param)), key, _value(value))
    return state


def _names(subject: Path, saved_groups: Sequence[dict], groups: Sequence[dict]) -> dict[Any, str]:
    """Returns the parameter name of each number, where parameters are numbered."""
    if not any(isinstance(param, int) for group in saved_groups for param in group["params"]):
        return {}
    if all("param_names" in group for group in saved_groups):
        pairs = [(group["params"], group["param_names"]) for group in saved_groups]
    else:
        pairs = [(saved["params"], own["param_names"]) for saved, own in zip(saved_groups, groups)]
        found = [len(group["params"]) for group in saved_groups]
        if found != [len(group["param_names"]) for group in groups]:
            raise CheckpointError(
                f"{subject}: its groups have {found} parameters, this run's "
                f"{[len(group['param_names']) for group in groups]}; "
                "resume with the trainable parameters and groups of the run that saved it"
            )
    return {param: name for params, names in pairs for param, name in zip(params, names, strict=True)}


def _value(value: Any) -> ForeignTensor | float:
    if isinstance(value, ForeignTensor) or not isinstance(value, Tensor):
        return value
    return ForeignTensor.of(value) if value.dim() else float(value)
