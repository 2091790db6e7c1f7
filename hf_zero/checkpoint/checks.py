"""Checks of folders: that a checkpoint is complete and unchanged, and that a model of any program can be loaded.

`check_checkpoint` compares the files that a run reads with the manifest, except the values of tensors, which are
verified while they are loaded. `check_checksums` compares everything.
"""

import contextlib
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.format import ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME, WeightFiles, is_weight_file
from hf_zero.checkpoint.manifest import COPY_AGAIN, STATE_FOLDER, STATE_PATTERNS, Checksums, Manifest
from hf_zero.checkpoint.names import shortened
from hf_zero.errors import CheckpointError, MissingCheckpointError


_CONFIG_NAMES = ("config.json", "adapter_config.json")


def check_checkpoint(folder: str | os.PathLike) -> Manifest | None:
    """Checks that the files that a run reads from a checkpoint are complete and unchanged, except the values of
    tensors. Returns its manifest. For a folder of another program, checks headers and configs, and returns `None`."""
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
    """Compares every file and tensor of a folder with its manifest, starting with those that training reads. Returns
    `None` for a folder without a manifest.

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
    changed = manifest.check_files(folder, without=left_out)
    tensors = [unit for unit in manifest.tensors if unit[0] not in left_out]
    manifest.check_tensors(folder, tensors, known)
    if changed:
        raise CheckpointError(
            f"{folder}: weights and state are unchanged, but {shortened(changed)} changed or went missing since the "
            f"save; if you did not edit them, {COPY_AGAIN}"
        )
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
