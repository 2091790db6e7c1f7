"""The layout of a safetensors file: header bytes and offsets from a list of tensors, and back from a file."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hf_zero.errors import CheckpointError


# In the order in which the safetensors library lays tensors out (which keeps every tensor aligned to its dtype).
DTYPE_OF_CODE = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_ORDER = {dtype: position for position, dtype in enumerate(DTYPE_OF_CODE.values())}

# The safetensors library refuses longer headers; a length beyond it is garbage, and is not read into memory.
MAX_HEADER_NBYTES = 100_000_000
_METADATA_KEY = "__metadata__"
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: the whole tensor, whoever writes which part of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The places of all tensors in one safetensors file.

    Args:
        header (`bytes`): length, JSON and padding: the file's first bytes as they are on disk.
        entries (`Mapping[str, TensorEntry]`): the tensors by name, in file order.
        offsets (`Mapping[str, int]`): for each tensor, the byte of the file at which it begins.
        nbytes (`int`): size of the whole file.
    """

    header: bytes
    entries: Mapping[str, TensorEntry]
    offsets: Mapping[str, int]
    nbytes: int

    @property
    def data_nbytes(self) -> int:
        return self.nbytes - len(self.header)

    def entry(self, name: str, path: str) -> TensorEntry:
        """The tensor of that name; `path` is for the message when there is none."""
        if name not in self.entries:
            raise CheckpointError(
                f"{path}: tensor {name!r} is missing, the file holds {len(self.entries)} others; "
                "use a checkpoint of this model"
            )
        return self.entries[name]

    @classmethod
    def build(cls, entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> "FileLayout":
        """Lays tensors out as `safetensors.torch.save_file` does, so that the same tensors give the same bytes.

        Args:
            entries (`Iterable[TensorEntry]`): in any order; wide dtypes come first in the file, then it goes by name.
            metadata (`Mapping[str, str]`, *optional*): defaults to `{"format": "pt"}`, which transformers asks for.

        Raises:
            `CheckpointError`: two tensors of one name, or a dtype that the format lacks.
        """
        ordered = sorted(entries, key=_file_order)
        header: dict = {_METADATA_KEY: dict(metadata or {"format": "pt"})}
        begin = 0
        for entry in ordered:
            if entry.name in header:
                raise CheckpointError(f"tensor {entry.name!r} is given twice; give every tensor its own name")
            code, end = CODE_OF_DTYPE[entry.dtype], begin + entry.nbytes
            header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        prefix = len(text).to_bytes(8, "little") + text
        offsets = {entry.name: len(prefix) + header[entry.name]["data_offsets"][0] for entry in ordered}
        return cls(prefix, {entry.name: entry for entry in ordered}, offsets, len(prefix) + begin)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "FileLayout":
        """Reads a file's header, and checks it against itself and against the size of the file.

        Raises:
            `CheckpointError`: the file is missing, truncated, or not a safetensors file.
        """
        path = os.fspath(path)
        try:
            with open(path, "rb") as file:
                prefix, file_nbytes = _read_prefix(file, path), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the path") from error
        described = _parse(prefix, path)
        position = len(prefix)
        offsets = {}
        for entry, begin, end in sorted(described, key=lambda item: item[1:]):
            if len(prefix) + begin != position or end - begin != entry.nbytes:
                raise CheckpointError(
                    f"{path}: tensor {entry.name!r} ({entry.dtype}, shape {list(entry.shape)}) lies at bytes "
                    f"[{begin}, {end}) of the data, expected [{position - len(prefix)}, "
                    f"{position - len(prefix) + entry.nbytes}): the header is damaged; {_AGAIN}"
                )
            offsets[entry.name] = position
            position += entry.nbytes
        if position != file_nbytes:
            kind = "truncated" if file_nbytes < position else "too long"
            raise CheckpointError(
                f"{path}: the file is {kind}: {file_nbytes} bytes, its header describes {position}; {_AGAIN}"
            )
        return cls(prefix, {entry.name: entry for entry, _, _ in described}, offsets, position)


def _file_order(entry: TensorEntry) -> tuple[int, bytes]:
    if entry.dtype not in _ORDER:
        raise CheckpointError(
            f"tensor {entry.name!r} is {entry.dtype}, which safetensors files cannot hold; save it in another dtype"
        )
    return _ORDER[entry.dtype], entry.name.encode()


def _read_prefix(file, path: str) -> bytes:
    start = file.read(8)
    file_nbytes = os.fstat(file.fileno()).st_size
    if _LFS_POINTER.startswith(start) and start:
        raise CheckpointError(f"{path}: this is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")
    header_nbytes = int.from_bytes(start, "little")
    if len(start) < 8 or header_nbytes > min(MAX_HEADER_NBYTES, file_nbytes - 8):
        found = f"a header of {header_nbytes} bytes in a file of {file_nbytes}" if len(start) == 8 else f"{start!r}"
        raise CheckpointError(f"{path}: truncated, or not a safetensors file: found {found}; {_AGAIN}")
    return start + file.read(header_nbytes)


def _parse(prefix: bytes, path: str) -> list[tuple[TensorEntry, int, int]]:
    """The tensors of a header, each with its first byte and the byte after its last, counted within the data."""
    try:
        header = json.loads(prefix[8:])
        return [_parse_entry(name, header[name]) for name in header if name != _METADATA_KEY]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: the header cannot be understood ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error


def _parse_entry(name: str, described: dict) -> tuple[TensorEntry, int, int]:
    code, shape, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
    if code not in DTYPE_OF_CODE:
        raise ValueError(f"dtype {code!r} of {name!r} is none of {', '.join(DTYPE_OF_CODE)}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or bytes [{begin}, {end}) of {name!r} are not natural numbers")
    return TensorEntry(name, DTYPE_OF_CODE[code], tuple(shape)), begin, end
