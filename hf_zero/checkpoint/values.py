"""Checks of tensor values for `hf-zero verify`. Each file is read once, in pieces."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import SafetensorsFile
from hf_zero.checkpoint.format import TensorEntry
from hf_zero.checkpoint.manifest import COPY_AGAIN
from hf_zero.checkpoint.names import shortened
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class TensorScan:
    """The result of reading a tensor once."""

    entry: TensorEntry
    crc32: int  # zlib.crc32 of the tensor's bytes in the file
    num_nonfinite: int  # number of NaN or infinite elements


Scans = Mapping[str, Mapping[str, TensorScan]]  # by file name in the folder, then by tensor name


def scan_files(folder: str | os.PathLike, names: list[str]) -> Scans:
    """Reads safetensors files of a folder once, sequentially and in pieces of 4 MiB. Raises [`CheckpointError`] if one
    is missing, damaged or truncated."""
    scans: dict[str, dict[str, TensorScan]] = {}
    for name in names:
        path = Path(folder) / name
        try:
            with SafetensorsFile.open(path) as file:
                scans[name] = {tensor: _scan(file, entry) for tensor, entry in file.layout.entries.items()}
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {COPY_AGAIN}") from error
    return scans


def check_finite(folder: str | os.PathLike, scans: Scans) -> int:
    """Raises for the first file with NaN or infinite values, and lists its tensors. Returns the number of tensors."""
    for file, found in scans.items():
        wrong = [scan for scan in found.values() if scan.num_nonfinite]
        bad = [f"{scan.entry.name} ({scan.num_nonfinite} of {scan.entry.numel})" for scan in wrong]
        if bad:
            raise CheckpointError(
                f"{Path(folder) / file}: non-finite values in {shortened(bad)}; use an earlier checkpoint"
            )
    return sum(map(len, scans.values()))


def check_ties(folder: str | os.PathLike, scans: Scans, ties: Mapping[str, str]) -> int:
    """Compares tied tensors that are stored under both names. `ties` maps the tied name to its source. Returns the
    number of pairs."""
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
