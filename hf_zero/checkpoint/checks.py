"""Checks of folders: that a checkpoint is complete and unchanged, and that a model of any program can be loaded.

`check_checkpoint` compares all files with the manifest, except the values of tensors, which are verified while they
are loaded. `check_checksums` compares everything.
"""

import contextlib
import os
from fnmatch import fnmatch
from pathlib import Path

from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.format import ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME, WeightFiles
from hf_zero.checkpoint.manifest import STATE_FOLDER, STATE_PATTERNS, Manifest
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


def check_checksums(folder: str | os.PathLike) -> Manifest | None:
    """Compares every file and tensor of a folder with its manifest. The files of the run's state may be missing if all
    of them are, as in a folder that was uploaded.

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
    manifest.check_tensors(folder, manifest.tensors)
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
