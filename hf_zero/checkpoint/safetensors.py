"""Safetensors files: the layout of a file, the files of a folder, checksums, and reading and writing of ranges.

A safetensors file (https://github.com/huggingface/safetensors#format) has 8 bytes of little-endian header length, a
JSON header padded with spaces to a multiple of 8, and the tensors' bytes, little-endian and row-major, without gaps.
All offsets follow from the header, so any number of processes can write their own ranges of one file.

The CRC-32s of ranges can be combined to that of the tensor. So any number of ranks can verify a tensor together,
although each sees only its own ranges, and so can other programs (zlib.crc32 of the tensor's bytes in the file). CRC(A
+ B) follows from CRC(A), CRC(B) and the length of B by linear algebra over GF(2): appending n zero bytes multiplies
the remainder by x^(8n) (Ross Williams, "A painless guide to CRC error detection algorithms", 1993; zlib's
crc32_combine).
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_zero.checkpoint.folders import read_json
from hf_zero.errors import CheckpointError, ConfigError, MissingCheckpointError, size_text


WEIGHTS_NAME = "model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"  # PEFT's name
# In the order in which the safetensors library sorts tensors, which keeps every tensor aligned to its dtype.
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

# Size of the pieces that are read, converted and copied from a device: a full tensor is never held twice, and a piece
# is still in the CPU cache when its checksum is computed.
PIECE_NBYTES = 4 * 2**20

_METADATA_KEY = "__metadata__"
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorEntry:
    """The entry of a tensor in a file's header."""

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
    """The offsets of all tensors in a safetensors file."""

    header: bytes  # length, JSON and padding, as on disk
    entries: Mapping[str, TensorEntry]  # by name, in file order
    offsets: Mapping[str, int]  # first byte of each tensor in the file
    nbytes: int  # of the file

    @property
    def data_nbytes(self) -> int:
        return self.nbytes - len(self.header)

    @classmethod
    def build(cls, entries: Iterable[TensorEntry]) -> "FileLayout":
        """Creates the layout of `safetensors.torch.save_file`, byte for byte: tensors are sorted by decreasing size of
        their dtype, then by name. Raises [`CheckpointError`] for an unsupported dtype."""
        ordered = sorted(entries, key=_file_order)
        header: dict = {_METADATA_KEY: {"format": "pt"}}  # required by transformers
        begin = 0
        for entry in ordered:
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
        """Reads a file's header. The safetensors library checks it and the size of the file. Raises
        [`CheckpointError`] if the file is missing, truncated, or not a safetensors file."""
        try:
            with open(path, "rb") as file, safe_open(path, "pt"):
                length = file.read(8)
                prefix = length + file.read(int.from_bytes(length, "little"))
            header = json.loads(prefix[8:])
            header.pop(_METADATA_KEY, None)
            described = [(each["data_offsets"][0], _parsed(name, each)) for name, each in header.items()]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
        except (SafetensorError, KeyError, ValueError) as error:
            if _is_lfs_pointer(path):
                raise CheckpointError(
                    f"{path}: this is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
                ) from error
            raise CheckpointError(
                f"{path}: truncated, damaged, or not a safetensors file ({error}); {_AGAIN}"
            ) from error
        entries = {entry.name: entry for _, entry in described}
        offsets = {entry.name: len(prefix) + begin for begin, entry in described}
        return cls(prefix, entries, offsets, len(prefix) + sum(entry.nbytes for entry in entries.values()))


def _file_order(entry: TensorEntry) -> tuple[int, bytes]:
    if entry.dtype not in _ORDER:
        raise CheckpointError(
            f"tensor {entry.name!r} is {entry.dtype}, which safetensors does not support; save it in another dtype"
        )
    return _ORDER[entry.dtype], entry.name.encode()


def _parsed(name: str, described: dict) -> TensorEntry:
    return TensorEntry(name, DTYPE_OF_CODE[described["dtype"]], tuple(described["shape"]))


def _is_lfs_pointer(path: str | os.PathLike) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


_POLYNOMIAL = 0xEDB88320  # CRC-32, with the coefficient of x^0 in the highest bit
_ONE, _X = 1 << 31, 1 << 30


class RangeChecksum(NamedTuple):
    """The CRC-32 of bytes [begin, begin + nbytes) of a tensor in a file."""

    begin: int
    nbytes: int
    crc: int


Ranges = dict[str, list[RangeChecksum]]  # by tensor


def crc_of_whole(ranges: Iterable[RangeChecksum], nbytes: int) -> int | None:
    """Combines the CRC-32s of ranges to that of a tensor of `nbytes` bytes. Ranges may be in any order and repeated.
    Returns `None` if they have a gap, or overlap without being equal."""
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


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a folder."""

    layouts: Mapping[str, FileLayout]  # by file
    file_of: Mapping[str, str]  # the file of each tensor
    index_name: str | None  # name of the index file; None for a single file

    @classmethod
    def of(cls, layouts: Mapping[str, FileLayout], index_name: str | None = None) -> "WeightFiles":
        """Creates an instance from layouts. If a tensor is in several files, the last one counts, as in
        transformers."""
        return cls(layouts, {name: file for file, layout in layouts.items() for name in layout.entries}, index_name)

    @classmethod
    def plan(
        cls,
        entries: Iterable[TensorEntry],
        *,
        max_shard_size: int | str = "50GB",
        weights_name: str = WEIGHTS_NAME,
    ) -> "WeightFiles":
        """Splits tensors, in the order of the state dict, over files exactly like `PreTrainedModel.save_pretrained`.
        The arguments are those of `save_pretrained`. A tensor larger than `max_shard_size` gets its own file."""
        named = {entry.name: entry for entry in entries}
        try:
            found = split_state_dict_into_shards_factory(
                named,
                get_storage_size=lambda entry: entry.nbytes,
                filename_pattern=weights_name.removesuffix(".safetensors") + "{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise ConfigError(
                f"max_shard_size {max_shard_size!r} is not a size; expected a number of bytes, or text such as '5GB' "
                "(TB, GB, MB, KB)"
            ) from error
        shards = found.filename_to_tensors or {weights_name: []}
        layouts = {name: FileLayout.build(map(named.__getitem__, names)) for name, names in shards.items()}
        return cls.of(layouts, _index_name(weights_name) if found.is_sharded else None)

    @classmethod
    def read(cls, folder: str | os.PathLike, weights_name: str = WEIGHTS_NAME) -> "WeightFiles":
        """Finds the weights of a folder, and checks all headers and the index, if there is one. Raises
        [`CheckpointError`] if the folder does not exist or has no weights, a file is damaged, or the index does not
        match the files."""
        folder = Path(folder)
        index_name = _index_name(weights_name)
        if not folder.is_dir():
            raise MissingCheckpointError(f"{folder}: no such folder; check the path")
        if (folder / weights_name).exists():
            return cls.of({weights_name: FileLayout.read(folder / weights_name)})
        if not (folder / index_name).exists():
            raise MissingCheckpointError(
                f"{folder}: found neither {weights_name} nor {index_name}; pass the folder of a saved model"
            )
        weight_map = _read_weight_map(folder / index_name)
        layouts = {name: FileLayout.read(folder / name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in layouts[name].entries:
                raise CheckpointError(
                    f"{folder / index_name}: lists tensor {tensor!r} in {name}, which does not contain it; copy or "
                    "download the folder again"
                )
        return cls(layouts, weight_map, index_name)

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by name."""
        return {tensor: self.entry(tensor) for tensor in self.file_of}

    def entry(self, tensor: str) -> TensorEntry:
        return self.layouts[self.file_of[tensor]].entries[tensor]

    def index_text(self, num_parameters: int) -> str:
        """Returns the content of the index file in transformers' format. `num_parameters` counts tied parameters
        once."""
        total_nbytes = sum(layout.data_nbytes for layout in self.layouts.values())
        index = {
            "metadata": {"total_parameters": num_parameters, "total_size": total_nbytes},
            "weight_map": dict(self.file_of),
        }
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def stem_of(name: str) -> str | None:
    """Returns the stem that a single weight file, its shards and their index share, or `None` for other files."""
    match = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5}\.safetensors|\.safetensors(\.index\.json)?)", name)
    return None if match is None else match[1]


def _index_name(weights_name: str) -> str:
    return f"{weights_name}.index.json"


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path, "copy or download it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: the index does not map tensors to files; copy or download it again")
    return weight_map


def create_file(path: str | os.PathLike, layout: FileLayout) -> None:
    """Creates a safetensors file: writes the header and reserves space for all tensors. Raises [`CheckpointError`] if
    the file cannot be created or the disk is full."""
    try:
        with open(path, "wb") as file:
            # Reserving also makes the file contiguous: writes into it were a third faster than into a sparse file.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, layout.nbytes)
            else:
                os.ftruncate(file.fileno(), layout.nbytes)
            file.write(layout.header)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {size_text(layout.nbytes)} could not be reserved ({error.strerror}); free space there or save "
            "to another folder"
        ) from error


class OpenFiles:
    """The files of a folder, a context manager. Each file is opened on first use, for reading or, if `writable`, for
    writing. Files to write must already exist with the same layout."""

    def __init__(self, folder: str | os.PathLike, files: WeightFiles, *, writable: bool = False):
        self.folder = Path(folder)
        self.files = files
        self._writable = writable
        self._descriptors: dict[str, int] = {}  # by file
        self.ranges: Ranges = {}  # ranges that this process has written or read

    @classmethod
    def of(cls, path: str | os.PathLike) -> "OpenFiles":
        """Opens one file for reading. Raises [`CheckpointError`] if it is missing, damaged or truncated."""
        path = Path(path)
        return cls(path.parent, WeightFiles.of({path.name: FileLayout.read(path)}))

    def write_range(self, tensor: str, start: int, values: Tensor) -> None:
        """Writes 1-D `values`, of any dtype and on any device, as the elements from `start` on of a flattened tensor.
        Converts them in pieces to the file's dtype. Raises [`CheckpointError`] if the write fails, for example because
        the disk is full."""
        self._transfer(tensor, start, values.detach(), writes=True)

    def read_range(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills `out`, 1-D and on any device, with the elements from `start` on of a flattened tensor. Converts the
        file's values in pieces to its dtype. Raises [`CheckpointError`] if only one of the dtypes is floating-point,
        or the file ends early."""
        entry = self.files.entry(tensor)
        if entry.dtype.is_floating_point != out.dtype.is_floating_point:
            raise CheckpointError(
                f"{self._place(tensor)[0]}: tensor {tensor!r} is {entry.dtype}, the model's is {out.dtype}; "
                "load with the config saved beside it"
            )
        self._transfer(tensor, start, out.detach(), writes=False)

    def _transfer(self, tensor: str, start: int, values: Tensor, *, writes: bool) -> None:
        """Moves values to or from the file in pieces, and records the range with its checksum."""
        dtype = self.files.entry(tensor).dtype
        is_direct = values.device.type == "cpu" and values.dtype == dtype and values.is_contiguous()
        piece_numel = PIECE_NBYTES // dtype.itemsize
        buffer = torch.empty(0 if is_direct else min(values.numel(), piece_numel), dtype=dtype)
        begin, nbytes, crc = start * dtype.itemsize, 0, 0
        for piece in values.split(piece_numel):
            moved = piece if is_direct else buffer[: piece.numel()]
            if writes and not is_direct:
                moved.copy_(piece)
            view = moved.view(torch.uint8).numpy().data
            (self._write if writes else self._read)(tensor, begin + nbytes, view)
            if not writes and not is_direct:
                piece.copy_(moved)
            nbytes, crc = nbytes + len(view), zlib.crc32(view, crc)
        self.ranges.setdefault(tensor, []).append(RangeChecksum(begin, nbytes, crc))

    def pieces(self, tensor: str) -> Iterator[memoryview]:
        """Yields the bytes of one tensor in pieces. Reuses one buffer."""
        nbytes = self.files.entry(tensor).nbytes
        buffer = memoryview(bytearray(min(nbytes, PIECE_NBYTES)))
        for begin in range(0, nbytes, PIECE_NBYTES):
            piece = buffer[: nbytes - begin]
            self._read(tensor, begin, piece)
            yield piece

    def checksum(self, tensor: str) -> int:
        """Returns the CRC-32 of the bytes of a tensor."""
        crc = 0
        for piece in self.pieces(tensor):
            crc = zlib.crc32(piece, crc)
        return crc

    def check_shape(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises `CheckpointError` if the tensor is missing or has another shape."""
        if tensor not in self.files.file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {tensor!r} is missing, found {len(self.files.file_of)} others; "
                "use a checkpoint of this model"
            )
        found = self.files.entry(tensor).shape
        if found != shape:
            raise CheckpointError(
                f"{self.folder / self.files.file_of[tensor]}: tensor {tensor!r} has shape {list(found)}, the model's "
                f"has {list(shape)}; load with the config saved beside it"
            )

    def sync(self) -> None:
        """Flushes all writes to disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _write(self, tensor: str, begin: int, view: memoryview) -> None:
        """Writes `view` as the bytes of one tensor that start at byte `begin`."""
        path, descriptor, offset = self._place(tensor)
        try:
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + begin + done)
        except OSError as error:
            raise CheckpointError(
                f"{path}: writing tensor {tensor!r} failed ({error.strerror}); free space there or save to another "
                "folder"
            ) from error

    def _read(self, tensor: str, begin: int, view: memoryview) -> None:
        """Fills `view` with the bytes of one tensor that start at byte `begin`."""
        path, descriptor, offset = self._place(tensor)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + begin + done)
            if not count:
                raise CheckpointError(
                    f"{path}: the file ended inside tensor {tensor!r}, {len(view) - done} bytes short, so it was "
                    "truncated while it was read; copy or download it again"
                )
            done += count

    def _place(self, tensor: str) -> tuple[Path, int, int]:
        """Returns the path and the descriptor of a tensor's file, and the offset of its first byte."""
        name = self.files.file_of[tensor]
        path = self.folder / name
        if name not in self._descriptors:
            try:
                self._descriptors[name] = os.open(path, os.O_RDWR if self._writable else os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be opened ({error.strerror}); every rank needs access to the checkpoint folder"
                ) from error
        return path, self._descriptors[name], self.files.layouts[name].offsets[tensor]
