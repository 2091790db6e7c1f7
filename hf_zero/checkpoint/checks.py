"""Checks of folders: that a checkpoint is complete and unchanged, that a model of any program can be loaded, and that
values are finite.

`check_checkpoint` compares all files with the manifest, except the values of tensors, which are verified while they
are loaded. `check_checksums` compares everything.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import OpenFiles
from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.format import ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME, TensorEntry, WeightFiles, is_weight_file
from hf_zero.checkpoint.manifest import COPY_AGAIN, STATE_FOLDER, STATE_PATTERNS, Checksums, Manifest
from hf_zero.checkpoint.names import shortened
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


@dataclass(frozen=True)
class Compared:
    """The result of a successful comparison with the manifest."""

    num_tensors: int
    num_files: int  # including files without tensors
    left_out: tuple[str, ...]  # files of the run's state, if the folder was uploaded or copied without it


def check_checksums(folder: str | os.PathLike, known: Checksums | None = None) -> Compared | None:
    """Compares every file and tensor of a folder with its manifest. Returns `None` for a folder without a manifest.

    Args:
        folder (`str` or `os.PathLike`): The folder.
        known (`Checksums`, *optional*): Checksums of tensors in files that were already read.

    Raises:
        `CheckpointError`: If a file or tensor is missing or differs.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        return None
    state = [name for name in manifest.files if any(fnmatch(name, pattern) for pattern in STATE_PATTERNS)]
    has_state = (folder / STATE_FOLDER).exists() or any((folder / name).exists() for name in state)
    left_out = () if has_state else tuple(state)
    manifest.check_files(folder, without=left_out)
    tensors = [unit for unit in manifest.tensors if unit[0] not in left_out]
    manifest.check_tensors(folder, tensors, known)
    return Compared(len(tensors), len(manifest.files) - len(left_out), left_out)


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a model can be loaded from a folder: it has a config, weights, and complete safetensors files.

    Reads only the headers. Does not check weights in other formats.

    Args:
        folder (`str` or `os.PathLike`): The folder.
        variant (`str`, *optional*): Such as "fp16", for `model.fp16.safetensors`.
    """
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
    names = [ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME]
    if variant is not None:
        names.append(f"model.{variant}.safetensors")
    present = [name for name in names if any((folder / file).exists() for file in (name, f"{name}.index.json"))]
    for name in present:
        WeightFiles.read(folder, name)
    for name in (ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME):  # the index of a variant has another name
        parts = [path.name for path in folder.glob("*.safetensors") if is_weight_file(path.name, name)]
        if parts and name not in present:
            raise CheckpointError(
                f"{folder}: has {min(parts)} but no index {name}.index.json, so it is incomplete; copy or download it "
                "again"
            )
    other_formats = ("*.bin", "*.bin.index.json", "*.safetensors", "*.gguf")
    if not present and not any(any(folder.glob(pattern)) for pattern in other_formats):
        raise MissingCheckpointError(
            f"{folder}: found neither {WEIGHTS_NAME} nor {WEIGHTS_NAME}.index.json; pass the folder of a saved model"
        )


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
            with OpenFiles.of(path) as opened:
                scans[name] = {tensor: _scan(opened, tensor) for tensor in opened.files.file_of}
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


def _scan(opened: OpenFiles, tensor: str) -> TensorScan:
    entry, crc, num_nonfinite = opened.files.entry(tensor), 0, 0
    for piece, so_far in opened.pieces(tensor):
        crc = so_far
        num_nonfinite += _count_nonfinite(torch.frombuffer(piece, dtype=entry.dtype))
    return TensorScan(entry, crc, num_nonfinite)


def _count_nonfinite(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # torch has no isfinite for 8-bit floats
    return values.numel() - int(torch.isfinite(values).sum())
