"""The manifest: what is no tensor of a run's state, in JSON: how it was sharded, hyperparameters, counters."""

import json
import math
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.plain import is_file_name, is_inner_path, parse_json, read_bytes
from hf_zero.checkpoint.table import TABLE_NAME, ChecksumTable, FileSum
from hf_zero.errors import CheckpointError


STATE_FOLDER = "zero"
FORMAT_VERSION = 3
FORMER_VERSION = 2  # the manifest held the checksums, of tensors alone
MANIFEST_NAME = "manifest.json"

TAKE_ANOTHER = "resume from another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """The state's record. Without it the state is incomplete.

    Args:
        stage (`int`): ZeRO stage of the run that saved. Any stage can load.
        num_ranks (`int`): ranks of that run. Any number can load.
        step (`int`, *optional*): optimizer steps that the run had taken.
        loss (`float`, *optional*): of the last step, the mean over the ranks.
        grad_norm (`float`, *optional*): of the last step, before clipping.
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

    @property
    def state_files(self) -> list[str]:
        """The names of the safetensors files beside it."""
        return [name for name in self.dtypes if name != "weights"]

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Manifest":
        """Reads the manifest of a checkpoint folder, and compares it with its checksum.

        Raises:
            `CheckpointError`: there is none (no state, or a save cut off), it is damaged or of another version.
        """
        content = _content(folder)
        path = manifest_path(folder)
        missing = sorted({part.name for part in fields(cls)} - set(content))
        if missing:
            raise CheckpointError(f"{path}: {', '.join(missing)} missing; {TAKE_ANOTHER}")
        _check_types(content, path)
        return cls(**{part.name: content[part.name] for part in fields(cls)})


def recorded(folder: str | os.PathLike) -> ChecksumTable | None:
    """The checksums of a folder: its table or, of a checkpoint of the former version, what its manifest has.

    Returns:
        [`ChecksumTable`] or `None`: `None` for a model that was saved without any.

    Raises:
        `CheckpointError`: the table is damaged, or has gone from a checkpoint that had one.
    """
    table = ChecksumTable.covering(folder)
    if table is not None or not manifest_path(folder).is_file():
        return table
    content = _content(folder)
    path, files, tensors = manifest_path(folder), content.get("files"), content.get("checksums")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not _is_former(files, tensors):
        raise CheckpointError(f"{path}: files and checksums are not what a run writes; {TAKE_ANOTHER}")
    return ChecksumTable({name: FileSum(nbytes, None, tensors.get(name, {})) for name, nbytes in files.items()})


def manifest_path(folder: str | os.PathLike) -> Path:
    """Returns the path of a checkpoint folder's manifest."""
    return Path(folder) / STATE_FOLDER / MANIFEST_NAME


def _content(folder: str | os.PathLike) -> dict:
    """The manifest as it was saved, of a version that this hf_zero reads."""
    path, name = manifest_path(folder), f"{STATE_FOLDER}/{MANIFEST_NAME}"
    try:
        raw = read_bytes(path, TAKE_ANOTHER)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found: {folder} holds no complete optimizer state; "
            "resume from another checkpoint, or start a new run from its weights"
        ) from error
    table = ChecksumTable.read(folder)
    expected = table.files.get(name) if table is not None else None
    if expected is not None and zlib.crc32(raw) != expected.crc32:
        raise CheckpointError(f"{path}: has changed since it was saved; {TAKE_ANOTHER}")
    content = parse_json(raw, path, TAKE_ANOTHER)
    version = content.get("format_version")
    if version not in (FORMAT_VERSION, FORMER_VERSION):
        raise CheckpointError(
            f"{path}: format version {version}, this hf_zero reads {FORMER_VERSION} and {FORMAT_VERSION}; "
            "resume with the version of hf_zero that saved it"
        )
    if expected is None and version == FORMAT_VERSION:
        lacks = "is missing" if table is None else "does not list it"
        raise CheckpointError(
            f"{path}: {Path(folder) / TABLE_NAME} {lacks}: the checkpoint is incomplete; {TAKE_ANOTHER}"
        )
    return content


def _is_former(files: dict, tensors: dict) -> bool:
    sums = [crc for found in tensors.values() for crc in (found.values() if isinstance(found, dict) else [None])]
    return all(map(is_inner_path, files)) and all(type(number) is int for number in (*files.values(), *sums))


def _check_types(content: dict, path: Path) -> None:
    """Refuses values of wrong types with one line. Numbers that are no numbers would train on silently."""
    expected = {
        "stage": type(content["stage"]) is int,
        "num_ranks": type(content["num_ranks"]) is int and content["num_ranks"] > 0,
        "step": content["step"] is None or type(content["step"]) is int,
        "loss": content["loss"] is None or _is_number(content["loss"]),
        "grad_norm": content["grad_norm"] is None or _is_number(content["grad_norm"]),
        "dtypes": isinstance(content["dtypes"], dict) and all(map(is_file_name, content["dtypes"])),
        "groups": isinstance(content["groups"], list) and all(map(_is_group, content["groups"])),
        "scalars": isinstance(content["scalars"], dict) and all(map(_are_numbers, content["scalars"].values())),
        "extra": isinstance(content["extra"], dict),
    }
    for name, is_right in expected.items():
        if not is_right:
            raise CheckpointError(f"{path}: {name} is not what a run writes; {TAKE_ANOTHER}")


def _is_group(group: Any) -> bool:
    names = group.get("param_names") if isinstance(group, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    values = [one for value in group.values() for one in (value if isinstance(value, list) else [value])]
    return not any(isinstance(value, float) and math.isnan(value) for value in values)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(_is_number(value) and math.isfinite(value) for value in values.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
