"""Checks of whole folders: that a checkpoint is complete and unchanged, and that a model of any program can be loaded.

`check_checkpoint` compares all that a run reads but the values of tensors, which are compared while they are loaded;
`check_checksums` compares everything. Both ask the folder's manifest.
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
    """Checks that the files that a run reads of a checkpoint are complete and unchanged, without the values of
    tensors. Returns its manifest; `None` for a folder of another program, of which the headers and configs are
    checked."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_files(folder)
    else:
        check_weights(folder)
        _check_configs(folder)
    return manifest


@dataclass(frozen=True)
class Compared:
    """The files and tensors that agree with their checksums."""

    num_tensors: int
    num_files: int  # of all kinds
    left_out: tuple[str, ...]  # the run's state, where the folder was uploaded or copied without all of it


def check_checksums(folder: str | os.PathLike, known: Checksums | None = None) -> Compared | None:
    """Compares every file and tensor of a folder with its manifest, those first that training reads. Returns `None`
    for a folder that was saved without one.

    Args:
        known (`Checksums`, *optional*): of the tensors in files that have been read already; the others are read.

    Raises:
        `CheckpointError`: names the file, and the tensor, that is missing or differs.
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
            f"{folder}: weights and state are as they were saved, {shortened(changed)} changed since, or went; if "
            f"nobody edited that, {COPY_AGAIN}"
        )
    return Compared(len(tensors), len(manifest.files) - len(left_out), left_out)


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a folder can be loaded from: a config, weights, and safetensors files that are whole.

    Costs a read of the headers. Weights in other formats than safetensors are left to transformers. A variant is such
    as "fp16", for `model.fp16.safetensors`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist; give the folder of a saved model")
    if not any((folder / name).exists() for name in _CONFIG_NAMES):
        raise CheckpointError(f"{folder}: there is no config.json in it; give the folder of a saved model")
    _check_configs(folder)
    check_weights(folder, variant=variant)


def _check_configs(folder: str | os.PathLike) -> None:
    """Checks that the configs in a folder can be understood."""
    for name in _CONFIG_NAMES:
        with contextlib.suppress(FileNotFoundError):
            read_json(Path(folder) / name, "copy or download it again")


def check_weights(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks the weights as `check_pretrained` does, also of a model without a config."""
    folder = Path(folder)
    names = [ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME]
    if variant is not None:
        names.append(f"model.{variant}.safetensors")
    present = [name for name in names if any((folder / file).exists() for file in (name, f"{name}.index.json"))]
    for name in present:
        WeightFiles.read(folder, name)
    for name in (ADAPTER_WEIGHTS_NAME, WEIGHTS_NAME):  # variants name their index otherwise
        parts = [path.name for path in folder.glob("*.safetensors") if is_weight_file(path.name, name)]
        if parts and name not in present:
            raise CheckpointError(
                f"{folder}: holds {min(parts)} but no {name}.index.json, which says what lies in such files: it is "
                "incomplete; copy or download it again"
            )
    other_formats = ("*.bin", "*.bin.index.json", "*.safetensors", "*.gguf")
    if not present and not any(any(folder.glob(pattern)) for pattern in other_formats):
        raise MissingCheckpointError(
            f"{folder}: found neither {WEIGHTS_NAME} nor {WEIGHTS_NAME}.index.json; give the folder of a saved model"
        )
