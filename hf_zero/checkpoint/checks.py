"""Checks of folders: that a checkpoint is complete and unchanged, that a model of any program can be loaded, and that
values are finite.

`check_checkpoint` compares all files with the manifest, except the values of tensors, which are verified while they
are loaded. `check_checksums` compares everything.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.manifest import STATE_FOLDER, STATE_PATTERNS, Checksums, Manifest
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME, OpenFiles, TensorEntry, WeightFiles
from hf_zero.errors import CheckpointError, MissingCheckpointError


_CONFIG_NAMES = ("config.json", "adapter_config.json")


def check_checkpoint(folder: str | os.PathLike) -> Manifest | None:
    """Checks that a checkpoint is complete and unchanged, except the values of tensors. Returns its manifest. For a
    folder of another program, checks headers and configs, and returns `None`."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_files(folder)
    else:
        check_weights(folder)
        _check_configs(folder)
    return manifest


def check_checksums(folder: str | os.PathLike, known: Checksums | None = None) -> Manifest | None:
    """Compares every file and tensor of a folder with its manifest. The files of the run's state may be missing if all
    of them are, as in a folder that was uploaded. `known` are checksums of tensors in files that were already read.

    Returns the manifest of the compared files, or `None` for a folder without a manifest. Raises [`CheckpointError`]
    if a file or tensor is missing or differs."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        return None
    state = [name for name in manifest.files if any(fnmatch(name, pattern) for pattern in STATE_PATTERNS)]
    if not any((folder / name).exists() for name in (STATE_FOLDER, *state)):
        manifest = Manifest({name: found for name, found in manifest.files.items() if name not in state})
    manifest.check_files(folder)
    manifest.check_tensors(folder, manifest.tensors, known)
    return manifest


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a model can be loaded from a folder: it has a config, weights, and complete safetensors files, also
    of a `variant` ("fp16" for `model.fp16.safetensors`). Reads only the headers. Does not check weights in other
    formats."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist; pass the folder of a saved model")
    if not any((folder / name).exists() for name in _CONFIG_NAMES):
        raise CheckpointError(f"{folder}: has no config.json; pass the folder of a saved model")
    _check_configs(folder)
    check_weights(folder, variant=variant)


def _check_configs(folder: str | os.PathLike) -> None:
    for name in _CONFIG_NAMES:
        with contextlib.suppress(FileNotFoundError):
            read_json(Path(folder) / name, "copy or download it again")


def check_weights(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks weights like `check_pretrained`, also of a model without a config."""
    folder = Path(folder)
    names = [ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME] + ([] if variant is None else [f"model.{variant}.safetensors"])
    present = [name for name in names if any((folder / file).exists() for file in (name, f"{name}.index.json"))]
    for name in present:
        WeightFiles.read(folder, name)
    if not present and not any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.bin.index.json", "*.gguf")):
        raise MissingCheckpointError(
            f"{folder}: found neither {WEIGHTS_NAME} nor {WEIGHTS_NAME}.index.json; pass the folder of a saved model"
        )


class TensorScan(NamedTuple):
    """The result of reading a tensor once."""

    entry: TensorEntry
    crc32: int  # zlib.crc32 of the tensor's bytes in the file
    num_nonfinite: int  # number of NaN or infinite elements


Scans = Mapping[str, Mapping[str, TensorScan]]  # by file name in the folder, then by tensor name


def scan_files(folder: str | os.PathLike, names: list[str]) -> Scans:
    """Reads safetensors files of a folder once, sequentially and in pieces of 4 MiB. Raises [`CheckpointError`] if one
    is missing, damaged or truncated."""
    scans = {}
    for name in names:
        with OpenFiles.of(Path(folder) / name) as opened:
            scans[name] = {tensor: _scan(opened, tensor) for tensor in opened.files.file_of}
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


def _scan(opened: OpenFiles, tensor: str) -> TensorScan:
    entry, crc, num_nonfinite = opened.files.entry(tensor), 0, 0
    for piece in opened.pieces(tensor):
        crc = zlib.crc32(piece, crc)
        num_nonfinite += _count_nonfinite(torch.frombuffer(piece, dtype=entry.dtype))
    return TensorScan(entry, crc, num_nonfinite)


def _count_nonfinite(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # torch has no isfinite for 8-bit floats
    return values.numel() - int(torch.isfinite(values).sum())
