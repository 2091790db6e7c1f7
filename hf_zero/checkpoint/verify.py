"""Verifies the values of a checkpoint: numbers that are finite, tensors that belong together.

Everything streams: no more than one piece of a tensor is in memory at a time.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import SafetensorsFile
from hf_zero.checkpoint.format import TensorEntry
from hf_zero.checkpoint.manifest import STATE_FOLDER, Manifest, read_saved_state
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.state import MASTER_NAME
from hf_zero.checkpoint.table import COPY_AGAIN
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class TensorScan:
    """The result of reading a tensor once."""

    entry: TensorEntry
    crc32: int  # zlib's, of the whole tensor's bytes as they lie in the file
    num_nonfinite: int  # elements that are NaN or infinite


Scans = Mapping[str, Mapping[str, TensorScan]]  # by file name within the folder, then by tensor name


def scan_files(folder: str | os.PathLike, names: list[str]) -> Scans:
    """Reads safetensors files of a folder once, from their first byte to their last, in pieces of 4 MiB. Raises
    [`CheckpointError`] where one is missing, damaged or cut off."""
    return {name: scan_file(Path(folder) / name) for name in names}


def scan_file(path: str | os.PathLike) -> dict[str, TensorScan]:
    """Reads one safetensors file once; see `scan_files`."""
    path = os.fspath(path)
    try:
        with SafetensorsFile.open(path) as file:
            return {name: _scan(file, entry) for name, entry in file.layout.entries.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {COPY_AGAIN}") from error


def check_finite(folder: str | os.PathLike, scans: Scans) -> int:
    """Refuses NaN and infinity, naming the first file with such values, and the tensors. Returns how many tensors
    there are."""
    for file, found in scans.items():
        wrong = [scan for scan in found.values() if scan.num_nonfinite]
        bad = [f"{scan.entry.name} ({scan.num_nonfinite} of {scan.entry.numel})" for scan in wrong]
        if bad:
            raise CheckpointError(
                f"{Path(folder) / file}: values that are not finite in {shortened(bad)}; use an earlier checkpoint"
            )
    return sum(map(len, scans.values()))


def check_ties(folder: str | os.PathLike, scans: Scans, ties: Mapping[str, str]) -> int:
    """Compares tensors that the model ties, each to another name, and that are stored under both names. Returns how
    many pairs there are."""
    of = {name: scan for found in scans.values() for name, scan in found.items()}
    pairs = [(target, source) for target, source in ties.items() if target in of and source in of]
    for target, source in pairs:
        one, other = of[target], of[source]
        if (one.entry.dtype, one.entry.shape, one.crc32) != (other.entry.dtype, other.entry.shape, other.crc32):
            raise CheckpointError(
                f"{folder}: {target} and {source} are tied in the model, but stored with different values; "
                "save the model again, or set tie_word_embeddings to false in its config"
            )
    return len(pairs)


def check_optimizer_state(folder: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Checks that the optimizer state in `folder/zero` is whole: files, sizes, and every parameter's tensors, of the
    shapes of the weights where these are given by name. Costs a read of the headers. Returns how many tensors there
    are."""
    manifest, files, _ = read_saved_state(folder)
    trained = {name for group in manifest.groups for name in group["param_names"]}
    owner_of = {
        tensor: _owner(Path(folder) / STATE_FOLDER / name, files.entry(tensor), trained, shapes)
        for tensor, name in files.file_of.items()
    }
    _check_groups(folder, manifest, owner_of)
    return len(owner_of)


def _owner(path: Path, entry: TensorEntry, trained: set[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the parameter to which a tensor of state belongs. A master has the name of its parameter, which may be
    frozen."""
    owner = entry.name if path.name == MASTER_NAME else entry.name.rpartition(".")[0]
    if path.name != MASTER_NAME and owner not in trained:
        raise CheckpointError(f"{path}: tensor {entry.name!r} is of no parameter in the manifest; {COPY_AGAIN}")
    if owner in shapes and entry.shape != shapes[owner]:
        raise CheckpointError(
            f"{path}: tensor {entry.name!r} has shape {list(entry.shape)}, its weight {list(shapes[owner])}; "
            "weights and state are of different runs: use another checkpoint"
        )
    return owner


def _check_groups(folder: str | os.PathLike, manifest: Manifest, owner_of: Mapping[str, str]) -> None:
    """Checks that all parameters of a group with state have the same kinds of tensors and numbers."""
    keys_of: dict[str, set[str]] = {name: set(numbers) for name, numbers in manifest.scalars.items()}
    for tensor, owner in owner_of.items():
        if tensor != owner:
            keys_of.setdefault(owner, set()).add(tensor.rpartition(".")[2])
    for group in manifest.groups:
        stateful = [name for name in group["param_names"] if name in keys_of]
        expected = set().union(*(keys_of[name] for name in stateful))
        for name in stateful:
            if lacking := sorted(expected - keys_of[name]):
                raise CheckpointError(
                    f"{Path(folder) / STATE_FOLDER}: {name} has no {lacking[0]}, others of its group do: "
                    "the state is incomplete; use another checkpoint"
                )


def _scan(file: SafetensorsFile, entry: TensorEntry) -> TensorScan:
    crc, num_nonfinite = 0, 0
    for piece, so_far in file.pieces(entry.name):
        crc = so_far
        num_nonfinite += _count_nonfinite(torch.frombuffer(piece, dtype=entry.dtype))
    return TensorScan(entry, crc, num_nonfinite)


def _count_nonfinite(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # torch has no isfinite for 8-bit floats
    return values.numel() - int(torch.isfinite(values).sum())
