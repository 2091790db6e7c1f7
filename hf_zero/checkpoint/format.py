"""The format of a checkpoint's files: headers of safetensors files, checksums of their tensors, and JSON.

The CRC-32s of ranges combine into that of a tensor, whoever wrote or read which of them, so it can be checked by any
number of ranks, each of which sees only its own ranges, and by any other program (zlib.crc32 of the tensor's bytes in
the file). That CRC(A + B) follows from CRC(A), CRC(B) and the length of B is linear algebra over GF(2): appending n
zero bytes multiplies the remainder by x^(8n) (Ross Williams, "A painless guide to CRC error detection algorithms",
1993; zlib's crc32_combine).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

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
    """The entry of a whole tensor in a file's header."""

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
        """Returns the entry of that name. `path` names the file in an error."""
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
        """Reads a file's header, and checks it against itself and against the size of the file. Raises
        [`CheckpointError`] where the file is missing, truncated, or not a safetensors file."""
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
    """Returns the tensors of a header, each with its first byte and the byte after its last, counted within the
    data."""
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


_POLYNOMIAL = 0xEDB88320  # of CRC-32, the coefficient of x^0 in the highest bit
_ONE, _X = 1 << 31, 1 << 30


class RangeChecksum(NamedTuple):
    """The CRC-32 of bytes [begin, begin + nbytes) of a tensor in a file."""

    begin: int
    nbytes: int
    crc: int


def crc_of_whole(ranges: Iterable[RangeChecksum], nbytes: int) -> int | None:
    """Returns the CRC-32 of a tensor of `nbytes` bytes from those of `ranges`, in any order and possibly repeated;
    `None` where they leave a gap, or overlap without being equal."""
    crc, position = 0, 0
    for part in sorted(set(ranges)):
        if part.begin == position:
            crc = _times(_shift(part.nbytes), crc) ^ part.crc if crc else part.crc
            position += part.nbytes
        elif part.begin + part.nbytes > position:
            return None
    return crc if position == nbytes else None


@lru_cache(maxsize=1024)  # the blocks of a model have the same few lengths
def _shift(nbytes: int) -> int:
    """Returns x^(8 nbytes) modulo the polynomial."""
    power, square = _ONE, _X
    exponent = 8 * nbytes
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials modulo the polynomial."""
    product, bit = 0, _ONE
    while bit and a & (2 * bit - 1):
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


# The longest that belongs to a checkpoint is the log of a run: some hundred bytes for each logged step.
MAX_JSON_NBYTES = 512 * 2**20


def read_json(path: str | os.PathLike, remedy: str = "resume from another checkpoint") -> dict:
    """Returns the object that a JSON file holds.

    Raises:
        `FileNotFoundError`: there is none.
        `CheckpointError`: it cannot be read, is no JSON, too long or nested too deeply, or is no object.
    """
    return parse_json(read_bytes(path, remedy), path, remedy)


def read_bytes(path: str | os.PathLike, remedy: str) -> bytes:
    """Returns the content of a JSON file, up to a limit; see `read_json`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_JSON_NBYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); {remedy}") from error
    if len(content) > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path}: has more than {MAX_JSON_NBYTES} bytes, which no run writes; {remedy}")
    return content


def parse_json(content: bytes, path: str | os.PathLike, remedy: str) -> dict:
    """Returns the object in the content of a JSON file; see `read_json`."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, wanted an object; {remedy}")
    return found


def is_file_name(name: Any) -> bool:
    """Whether a text is the name of a file in one folder: not a path out of it, and nothing that the system
    refuses."""
    return is_inner_path(name) and "/" not in name and len(os.fsencode(name)) <= 255


def is_inner_path(name: Any) -> bool:
    """Whether a text is a relative path that stays below its folder."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        os.fsencode(name)
    except ValueError:  # half a character
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and str(path) == name and name != "." and ".." not in path.parts
