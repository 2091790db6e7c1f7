"""What lies beside the weights and is not a tensor: how a run was sharded, hyperparameters, counters. Plain JSON."""

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from hf_zero.errors import CheckpointError


STATE_FOLDER = "zero"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

Checksums = dict[str, dict[str, int]]  # file, to tensor, to the CRC-32 of its bytes


@dataclass(frozen=True)
class Manifest:
    """The state's table of contents, written last: without it the state is incomplete.

    Args:
        stage (`int`): ZeRO stage of the run that saved. Any stage can load.
        num_ranks (`int`): ranks of that run. Any number can load.
        step (`int`, *optional*): optimizer steps that the run had taken.
        loss (`float`, *optional*): of the last step, the mean over the ranks.
        grad_norm (`float`, *optional*): of the last step, before clipping.
        files (`dict[str, int]`): the safetensors files of the checkpoint, by path in it, and their sizes in bytes.
        checksums (`Checksums`): for each of them, the CRC-32 (zlib) of each tensor's bytes.
        dtypes (`dict[str, list[str]]`): dtypes of the "weights", and of the tensors of each file of the state.
        groups (`list[dict]`): the optimizer's hyperparameters and parameter names, group by group.
        scalars (`dict[str, dict[str, float]]`): per parameter that has state, its numbers, such as Adam's "step".
        extra (`dict`): whatever the caller wants back, JSON-able.
        format_version (`int`): of this layout.
    """

    stage: int
    num_ranks: int
    dtypes: dict[str, list[str]]
    groups: list[dict]
    scalars: dict[str, dict[str, float]]
    files: dict[str, int] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=dict)
    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    extra: dict = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """The file's content.

        Raises:
            `CheckpointError`: a hyperparameter or an extra that JSON does not know.
        """
        try:
            return json.dumps(asdict(self), indent=1) + "\n"
        except TypeError as error:
            raise CheckpointError(
                f"{MANIFEST_NAME}: a hyperparameter or extra value cannot be written ({error}); "
                "give numbers, texts, lists and dicts only"
            ) from error

    def checksums_in(self, subfolder: str = "") -> Checksums:
        """The checksums of the files in one folder of the checkpoint, by the files' names."""
        return {
            os.path.basename(path): crcs for path, crcs in self.checksums.items() if os.path.dirname(path) == subfolder
        }

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Manifest":
        """Reads the manifest of a checkpoint folder.

        Raises:
            `CheckpointError`: there is none (no state, or a save cut off), it is damaged or of another version.
        """
        path = manifest_path(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: not found: {folder} holds no complete optimizer state; "
                "resume from another checkpoint, or start a new run from its weights"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); resume from another checkpoint") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format version {version}, this hf_zero reads {FORMAT_VERSION}; "
                "resume with the version of hf_zero that saved it"
            )
        missing = sorted({part.name for part in fields(cls)} - set(content))
        if missing:
            raise CheckpointError(f"{path}: {', '.join(missing)} missing; resume from another checkpoint")
        return cls(**{part.name: content[part.name] for part in fields(cls)})


def saved_checksums(folder: str | os.PathLike) -> Checksums:
    """The checksums of a folder's weights, by file and tensor; empty for a model that is no checkpoint, or one of
    another version, whose state cannot be read but whose weights can."""
    try:
        return Manifest.read(folder).checksums_in()
    except CheckpointError:
        return {}


def manifest_path(folder: str | os.PathLike) -> Path:
    """Where a checkpoint folder keeps its manifest."""
    return Path(folder) / STATE_FOLDER / MANIFEST_NAME
