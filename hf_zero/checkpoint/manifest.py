"""The manifest of a checkpoint's state, and the checks that a checkpoint is complete and unchanged, that its numbers
are finite, and that its tensors belong together.

`check_checkpoint` compares all that a run reads but the values of tensors, `load.check_ranges` tensors while a run
reads them, `check_checksums` a whole folder. All ask the folder's table of checksums. `check_pretrained` is for
folders of any program: that they can be loaded from.
"""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.files import SafetensorsFile
from hf_zero.checkpoint.folders import is_file_name, parse_json, read_bytes, read_json
from hf_zero.checkpoint.format import (
    ADAPTER_WEIGHTS_NAME,
    WEIGHTS_NAME,
    FileLayout,
    TensorEntry,
    WeightFiles,
    is_weight_file,
)
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.table import (
    COPY_AGAIN,
    MANIFEST_NAME,
    STATE_PATTERNS,
    TABLE_NAME,
    Checksums,
    ChecksumTable,
)
from hf_zero.errors import CheckpointError, MissingCheckpointError


CONFIG_NAMES = ("config.json", "adapter_config.json")
STATE_FOLDER, OPTIMIZER_NAME, MASTER_NAME = "zero", "optimizer.safetensors", "master.safetensors"
FORMAT_VERSION = 3

TAKE_ANOTHER = "resume from another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """The record of a saved state. A state without it is incomplete."""

    stage: int  # of the run that saved; any stage can load
    num_ranks: int  # likewise
    dtypes: dict[str, list[str]]  # of the "weights", and of the tensors of each file of the state
    groups: list[dict]  # the optimizer's hyperparameters and parameter names
    scalars: dict[str, dict[str, float]]  # per parameter that has state, its numbers, such as Adam's "step"
    step: int | None = None  # optimizer steps that the run had taken
    loss: float | None = None  # of the last step, the mean over the ranks
    grad_norm: float | None = None  # of the last step, before clipping
    extra: dict = field(default_factory=dict)  # whatever the caller wants back, JSON-able
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """The content of the manifest's file. Raises [`CheckpointError`] for a hyperparameter or an extra that JSON
        does not know."""
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
        """Reads the manifest of a checkpoint folder, and compares it with its checksum. Raises [`CheckpointError`]
        where there is none (no state, or a save cut off), it is damaged or of another version."""
        content = _content(folder)
        path = manifest_path(folder)
        missing = sorted({part.name for part in fields(cls)} - set(content))
        if missing:
            raise CheckpointError(f"{path}: {', '.join(missing)} missing; {TAKE_ANOTHER}")
        _check_types(content, path)
        return cls(**{part.name: content[part.name] for part in fields(cls)})


def check_checkpoint(folder: str | os.PathLike) -> None:
    """Checks that the files that a run reads of a checkpoint are complete and unchanged, without the values of
    tensors.

    Costs a read of headers and small files; `check_checksums` reads the tensors, too, and what people may have edited.
    """
    folder = Path(folder)
    table = recorded(folder)
    if table is not None:
        table.check_files(folder)
    check_weights(folder)
    check_configs(folder)
    if (folder / STATE_FOLDER).is_dir():
        read_saved_state(folder)


def read_saved_state(folder: str | os.PathLike) -> tuple[Manifest, WeightFiles, ChecksumTable]:
    """Reads manifest, files and checksums of a checkpoint's state, without the values of tensors. Raises
    [`CheckpointError`] where it is missing, damaged or incomplete."""
    manifest, table = Manifest.read(folder), recorded(folder) or ChecksumTable()
    layouts = {name: FileLayout.read(Path(folder) / STATE_FOLDER / name) for name in manifest.state_files}
    for name, layout in layouts.items():
        table.check_layout(folder, f"{STATE_FOLDER}/{name}", layout)
    return manifest, WeightFiles.of(layouts), table


@dataclass(frozen=True)
class Compared:
    """The files and tensors that agree with their checksums."""

    num_tensors: int
    num_files: int  # of all kinds
    left_out: tuple[str, ...]  # the run's state, all of which has stayed behind when the folder was pushed or copied


def check_checksums(folder: str | os.PathLike, known: Checksums | None = None) -> Compared | None:
    """Compares every file and tensor of a folder with its checksums, those first that training reads. Returns `None`
    for a folder that was saved without checksums.

    Args:
        known (`Checksums`, *optional*): of the tensors in files that have been read already; the others are read.

    Raises:
        `CheckpointError`: names the file, and the tensor, that differs or lacks.
    """
    folder = Path(folder)
    table = recorded(folder)
    if table is None:
        return None
    state = [name for name in table.files if any(fnmatch(name, pattern) for pattern in STATE_PATTERNS)]
    # A part of the state is none.
    left_out = () if any((folder / name).exists() for name in state) else tuple(state)
    table.check_files(folder, without=left_out)
    tensors = [unit for unit in table.tensors if unit[0] not in left_out]
    table.check_tensors(folder, tensors, known)
    if changed := table.changed_files(folder):
        raise CheckpointError(
            f"{folder}: weights and state are as they were saved, {shortened(changed)} changed since, or went; if "
            f"nobody edited that, {COPY_AGAIN}"
        )
    return Compared(len(tensors), len(table.files) - len(left_out), left_out)


def recorded(folder: str | os.PathLike) -> ChecksumTable | None:
    """Returns the checksums of a folder; `None` for a model that was saved without any. Raises [`CheckpointError`]
    where they are damaged, or have gone from a checkpoint that had them."""
    table = ChecksumTable.covering(folder)
    if table is None and manifest_path(folder).is_file():
        _content(folder)  # which refuses it
    return table


def check_pretrained(folder: str | os.PathLike, *, variant: str | None = None) -> None:
    """Checks that a folder can be loaded from: a config, weights, and safetensors files that are whole.

    Costs a read of the headers. Weights in other formats than safetensors are left to transformers. A variant is such
    as "fp16", for `model.fp16.safetensors`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist; give the folder of a saved model")
    if not any((folder / name).exists() for name in CONFIG_NAMES):
        raise CheckpointError(f"{folder}: there is no config.json in it; give the folder of a saved model")
    check_configs(folder)
    check_weights(folder, variant=variant)


def check_configs(folder: str | os.PathLike) -> None:
    """Checks that the configs in a folder can be understood."""
    for name in CONFIG_NAMES:
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


def manifest_path(folder: str | os.PathLike) -> Path:
    """Returns the path of a checkpoint folder's manifest."""
    return Path(folder) / STATE_FOLDER / MANIFEST_NAME


def _content(folder: str | os.PathLike) -> dict:
    """Returns the content of a manifest, after a check of its checksum and version."""
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
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {version}, this hf_zero reads {FORMAT_VERSION}; "
            "resume with the version of hf_zero that saved it"
        )
    if expected is None:
        lacks = "is missing" if table is None else "does not list it"
        raise CheckpointError(
            f"{path}: {Path(folder) / TABLE_NAME} {lacks}: the checkpoint is incomplete; {TAKE_ANOTHER}"
        )
    return content


def _check_types(content: dict, path: Path) -> None:
    """Refuses values of wrong types in one line. A NaN in place of a number would go unnoticed in training."""
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


# The values of tensors. No more than one piece of a tensor is in memory at a time


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
