"""Reads pickled files of other programs without running code from them.

`torch.load` gets `weights_only=True` throughout. The index of a torch distributed checkpoint is a plain pickle, for
which torch itself uses `pickle.load`: here an unpickler reads it that knows a dozen harmless names and refuses others.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from hf_zero.errors import CheckpointError


# A schedule, or the states of generators: a few KiB.
MAX_SMALL_NBYTES = 64 * 2**20

_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}


class InertRecord:
    """Stands for a class of another program: it keeps the data and runs nothing."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class Index(InertRecord):
    """Stands for `MetadataIndex`, the key under which the index keeps a piece."""

    fqn: str

    def key(self) -> tuple[str, tuple[int, ...] | None]:
        offset = getattr(self, "offset", None)
        return self.fqn, None if offset is None else tuple(offset)

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.key() == other.key()


def load_mapped(path: Path) -> Any:
    """Loads a file of `torch.save`, its tensors mapped and not read. Classes of DeepSpeed that it names (its loss
    scaler, an enumeration) become [`InertRecord`]s. Raises [`CheckpointError`] where it is missing, damaged, of the
    format before torch 1.6, or names code that is not known to be harmless."""
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; copy all files of the checkpoint")
    with _read(path):
        unknown = get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in unknown if not name.startswith("deepspeed.")]
        if foreign:
            raise _refusal(path, foreign[0])
        with safe_globals([(type("InertRecord", (InertRecord,), {}), name) for name in unknown]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_small(path: Path) -> Any:
    """Loads a small file of `torch.save`, which takes no more memory than it has bytes. Raises as `load_mapped`."""
    check_archive(path)
    with _read(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def load_archive(path: Path, device: torch.device) -> Any:
    """Loads a file of `torch.save` of any size, its tensors onto a device. Raises as `load_mapped`, and where it does
    not agree with its own checksums."""
    with _read(path):
        with zipfile.ZipFile(path) as archive:
            _ignore_absent_checksums(archive)
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"{path}: {damaged} in it is damaged; copy it again")
        location = "cpu" if device.type == "cpu" else device  # torch.load knows no cpu:0, as accelerate calls it
        return torch.load(path, map_location=location, weights_only=True)


def check_archive(path: Path) -> None:
    """Checks that a file is a small one of `torch.save`, agrees with its own checksums, and does not claim more bytes
    than it has. Nothing is loaded. Raises [`CheckpointError`] where it is empty, cut off, damaged, too large,
    compressed, or asks for memory by a number."""
    with _read(path):
        nbytes = path.stat().st_size
        if nbytes > MAX_SMALL_NBYTES:
            raise CheckpointError(f"{path}: has {nbytes} bytes, such a file has a few thousand; copy it again")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            held = sum(member.file_size for member in members)
            if held > nbytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CheckpointError(f"{path}: unpacks to {held} bytes, more than it has; copy it again")
            _ignore_absent_checksums(archive)
            contents = [(member.filename, archive.read(member)) for member in members]
    # torch lets a file make a bytearray of any size
    if any(name.endswith(".pkl") and b"bytearray" in content for name, content in contents):
        raise CheckpointError(f"{path}: names bytearray, which is none of what such a file holds; copy it again")


def _ignore_absent_checksums(archive: zipfile.ZipFile) -> None:
    for member in archive.infolist():
        crc: Any = member.CRC or None  # torch can be told to write none, which is not to be compared
        member.CRC = crc


def load_bytes(data: bytes, subject: str) -> Any:
    """Loads an object that `torch.save` wrote, from memory. Raises as `load_mapped`."""
    with _read(subject):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def load_index(path: Path) -> Any:
    """Reads the `.metadata` of a torch distributed checkpoint, its records as [`InertRecord`]s. Raises
    [`CheckpointError`] where it is damaged, or names anything else than such records."""
    with open(path, "rb") as file, _read(path):
        index = _IndexUnpickler(file, path).load()
    if not isinstance(getattr(index, "state_dict_metadata", None), dict):
        raise CheckpointError(f"{path}: is no index of a torch distributed checkpoint; give the folder that it wrote")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index with inert records in place of its classes. Besides them it knows torch's sizes, dtypes and
    layouts only."""

    RECORDS = {
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
        "pathlib._local": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    }

    def __init__(self, file, path: Path):
        super().__init__(file)
        self._path = path
        # Classes of this load alone: a file that meddles with a class meddles with nobody else's.
        self._index, self._size = type("Index", (Index,), {}), type("Size", (tuple,), {})
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in self.RECORDS.get(module, ()):
            return self._records.setdefault(name, type(name, (InertRecord,), {}))
        if (module, name) == ("torch.distributed.checkpoint.metadata", "MetadataIndex"):
            return self._index
        if (module, name) == ("torch", "Size"):
            return self._size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _LAYOUTS.get
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _refusal(self._path, f"{module}.{name}")

    def _member(self, record: type, name: str) -> Any:
        """Returns a member of an enumeration, as Python before 3.11.4 pickles it, and no attribute of anything
        else."""
        if not (isinstance(record, type) and issubclass(record, InertRecord) and isinstance(name, str)):
            raise _refusal(self._path, "builtins.getattr")
        return record(name)


@contextmanager
def _read(path: Path | str) -> Iterator[None]:
    """Turns every error into one line: damaged files fail in every way there is."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if unknown := re.search(r"GLOBAL ([\w.]+)", text):
            raise _refusal(path, unknown.group(1)) from error
        raise CheckpointError(
            f"{path}: cannot be read ({text[:160]}); it is damaged or incomplete, copy it again"
        ) from error


def _refusal(path: Path | str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: names {name}, which may run code when it is loaded, so it is not; "
        "give a checkpoint of tensors and numbers only"
    )
