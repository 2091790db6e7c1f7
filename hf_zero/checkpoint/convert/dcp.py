"""Checkpoints of `torch.distributed.checkpoint` (DCP), and those of Trainer and accelerate with FSDP.

torch assembles the tensors. FSDP checkpoints have two DCP folders, `pytorch_model_fsdp_0` and `optimizer_0`, or with
FULL_STATE_DICT two `torch.save` files. With torch's `get_state_dict`, one folder has "model" and "optim".

The index `.metadata` is a pickle, and torch would run code in it. Here an unpickler accepts only torch's own records.
"""

import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from hf_zero.checkpoint.convert.state import SavedState, state_by_name
from hf_zero.checkpoint.trusted import in_one_line, load_safely
from hf_zero.errors import CheckpointError


INDEX_NAME = ".metadata"
SAFETENSORS = ("shard-*-model-*.safetensors", "sharded/shard-*-model-*.safetensors")  # beside weights that were joined
FSDP_WEIGHTS, FSDP_STATE = "pytorch_model_fsdp", "optimizer"
WEIGHT_KEYS, STATE_KEYS = ("model",), ("optim", "optimizer")


def read(folder: Path) -> tuple[dict[str, Tensor], SavedState]:
    """Returns weights and optimizer state: the entries under "model", and under "optim" or "optimizer", flattened or
    not; or those of a Trainer run with FSDP, sharded or full. Raises [`CheckpointError`] if there are none, or the
    checkpoint is damaged."""
    whole, state = folder / f"{FSDP_WEIGHTS}.bin", folder / f"{FSDP_STATE}.bin"
    if whole.is_file():
        weights, saved = (load_safely(path, mmap=True) for path in (whole, state))
        return _tensors(weights), state_by_name(state, saved, {})
    if (folder / f"{FSDP_WEIGHTS}_0").is_dir():
        return read_weights(folder / f"{FSDP_WEIGHTS}_0"), _read_state(folder / f"{FSDP_STATE}_0")
    return read_weights(folder), _read_state(folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors under "model" by name. Raises like `read`."""
    return _tensors({".".join(map(str, path)): value for path, value in _read(folder, WEIGHT_KEYS).items()})


def _read_state(folder: Path) -> SavedState:
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in _read(folder, STATE_KEYS).items():
        kind, _, names = ".".join(map(str, path)).partition(".")  # one element in the flattened form
        name, _, key = names.rpartition(".")
        (state if kind == "state" else groups).setdefault(name, {})[key] = value
    # in the flattened form, each parameter has its own hyperparameters
    listed = [{"params": [name], **group} for name, group in groups.items()]
    return state_by_name(folder, {"state": state, "param_groups": listed}, {})


def _tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _read(folder: Path, roots: Sequence[str]) -> dict[tuple, Any]:
    """Returns everything under one of the roots, by the path below the root."""
    reader = _Reader(folder)
    index = reader.read_metadata()
    paths, found = {}, {}
    for key, record in index.state_dict_metadata.items():
        path = tuple((index.planner_data or {}).get(key) or (key,))
        path = path if len(path) > 1 else tuple(str(path[0]).split(".", 1))
        if path[0] in roots and len(path) > 1:
            paths[key] = path[1:]
            is_tensor = isinstance(record, metadata.TensorStorageMetadata)
            numel = sum(math.prod(chunk.sizes) for chunk in record.chunks) if is_tensor else 0
            if is_tensor and numel != math.prod(record.size):
                raise CheckpointError(
                    f"{folder}: the chunks of {key} have {numel} elements, its shape {list(record.size)} has "
                    f"{math.prod(record.size)}; the checkpoint is incomplete, copy it again"
                )
            found[key] = torch.empty(record.size, dtype=record.properties.dtype) if is_tensor else BytesIO()
    if not paths:
        raise CheckpointError(
            f"{folder}: has no entries under {' or '.join(map(repr, roots))}; "
            'save {"model": ..., "optim": ...} as returned by torch\'s get_state_dict'
        )
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)  # keep the keys of the index
    with in_one_line(folder):
        try:
            dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # not an `Exception`
            raise next(iter(error.failures.values()))[0] from None
    return {path: found[key] for key, path in paths.items()}


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)  # torch's would run code


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / INDEX_NAME
        if not path.is_file():
            raise CheckpointError(f"{path}: does not exist; copy all files of the checkpoint")
        with open(path, "rb") as file, in_one_line(path):
            index = _IndexUnpickler(file).load()
            if not isinstance(index, metadata.Metadata):
                raise TypeError(f"expected the index of a torch distributed checkpoint, found {type(index).__name__}")
        return index


def _member(owner: Any, name: str) -> Any:
    """Returns a member of torch's enumeration. Python before 3.11.4 pickles members as `getattr`."""
    if owner is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {owner}")
    return owner[name]


_RECORDS = (
    *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex),
    *(metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, OrderedDict),
)
# The names that an index may use: torch's records, sizes, dtypes and layouts. None of them runs code.
_HARMLESS: dict[str, Any] = {
    **{f"{record.__module__}.{record.__name__}": record for record in _RECORDS},
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    **dict.fromkeys(("pathlib.PosixPath", "pathlib.WindowsPath"), PurePosixPath),
    **dict.fromkeys(("pathlib._local.PosixPath", "pathlib._local.WindowsPath"), PurePosixPath),
    "torch.serialization._get_layout": {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}.get,
    "builtins.getattr": _member,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _HARMLESS.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return found
