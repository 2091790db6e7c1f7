"""Safetensors files with writes and reads of tensor ranges, in a single file or the files of a folder.

The format (https://github.com/huggingface/safetensors#format) is 8 bytes of little-endian header length, a JSON header
padded with spaces to a multiple of 8, and the tensors' bytes, little-endian and row-major, without gaps. All offsets
follow from the layout, so any number of processes can write their own ranges of one file.
"""

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from hf_zero.checkpoint.format import FileLayout, RangeChecksum, TensorEntry, WeightFiles
from hf_zero.errors import CheckpointError, size_text


# Size of the pieces that are read, converted and copied from a device: a full tensor is never held twice, and a piece
# is still in the CPU cache when its checksum is computed.
PIECE_NBYTES = 4 * 2**20
# Size of the pieces that are written directly from a tensor's memory: fewer calls give larger file extents.
_WRITE_NBYTES = 64 * 2**20


class SafetensorsFile:
    """An open safetensors file, a context manager. Use `create`, `open` or `open_for_writing`."""

    path: str
    layout: FileLayout

    def __init__(self, path: str, layout: FileLayout, file: io.FileIO):
        self.path = path
        self.layout = layout
        self._file = file

    @classmethod
    def create(cls, path: str | os.PathLike, layout: FileLayout) -> "SafetensorsFile":
        """Creates a file: writes the header and reserves space for all tensors. Raises [`CheckpointError`] if the file
        cannot be created or the disk is full."""
        file = cls(os.fspath(path), layout, _opened(path, "w+b"))
        try:
            _reserve(file._file.fileno(), layout.nbytes)
            file._pwrite(memoryview(layout.header), 0)
        except OSError as error:
            file.close()
            raise CheckpointError(
                f"{file.path}: {size_text(layout.nbytes)} could not be reserved ({error.strerror}); "
                "free space there or save to another folder"
            ) from error
        return file

    @classmethod
    def open_for_writing(cls, path: str | os.PathLike, layout: FileLayout) -> "SafetensorsFile":
        """Opens a file that some process has created with the same layout."""
        return cls(os.fspath(path), layout, _opened(path, "r+b"))

    @classmethod
    def open(cls, path: str | os.PathLike, layout: FileLayout | None = None) -> "SafetensorsFile":
        """Opens a file for reading. Unless `layout` is passed, reads the header and checks it. Raises
        [`CheckpointError`] if the file is missing, truncated, or not a safetensors file."""
        return cls(os.fspath(path), layout or FileLayout.read(path), _opened(path, "rb"))

    def write_range(self, name: str, start: int, values: Tensor) -> RangeChecksum:
        """Writes elements [start, start + values.numel()) of one tensor, row-major, in the file's dtype.

        Args:
            name (`str`): Name of the tensor.
            start (`int`): First element in the flattened tensor.
            values (`Tensor`): 1-D, of any dtype and on any device. Converted in pieces to the file's dtype.

        Raises:
            `CheckpointError`: If the range is outside the tensor or the write fails, for example because the disk is
                full.
        """
        entry = self._range_of(name, start, values)
        written = RangeChecksum(start * entry.dtype.itemsize, 0, 0)
        for view in _outgoing(values, entry.dtype):
            written = self.write_bytes(name, written, view)
        return written

    def write_bytes(self, name: str, after: RangeChecksum, view: memoryview) -> RangeChecksum:
        """Writes bytes of one tensor after the range `after`, which may be empty. Returns the extended range."""
        begin, nbytes, crc = after
        offset = self.layout.offsets[name] + begin + nbytes
        try:
            for first in range(0, len(view), _WRITE_NBYTES):
                piece = view[first : first + _WRITE_NBYTES]
                crc = zlib.crc32(piece, crc)
                self._pwrite(piece, offset + first)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: writing tensor {name!r} failed ({error.strerror}); "
                "free space there or save to another folder"
            ) from error
        return RangeChecksum(begin, nbytes + len(view), crc)

    def read_range(self, name: str, start: int, out: Tensor) -> RangeChecksum:
        """Fills `out` with elements [start, start + out.numel()) of one tensor.

        Args:
            name (`str`): Name of the tensor.
            start (`int`): First element in the flattened tensor.
            out (`Tensor`): 1-D, on any device. The file's values are converted in pieces to its dtype.

        Raises:
            `CheckpointError`: If the range is outside the tensor, only one of the dtypes is floating-point, or the
                file ends early.
        """
        entry = self._range_of(name, start, out)
        if entry.dtype.is_floating_point != out.dtype.is_floating_point:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {entry.dtype}, the model's is {out.dtype}; "
                "load with the config saved beside it"
            )
        out, read = out.detach(), RangeChecksum(start * entry.dtype.itemsize, 0, 0)
        if _is_addressable(out, entry.dtype):
            return self.read_bytes(name, read, _bytes_of(out))
        bounce = torch.empty(_piece_numel(out, entry.dtype), dtype=entry.dtype)
        for first in range(0, out.numel(), len(bounce)):
            target = out[first : first + len(bounce)]
            piece = bounce[: target.numel()]
            read = self.read_bytes(name, read, _bytes_of(piece))
            target.copy_(piece)
        return read

    def read_bytes(self, name: str, after: RangeChecksum, view: memoryview) -> RangeChecksum:
        """Fills `view` with bytes of one tensor after the range `after`, which may be empty. Returns the extended
        range."""
        begin, nbytes, crc = after
        self._file.seek(self.layout.offsets[name] + begin + nbytes)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + PIECE_NBYTES])
            if not count:
                raise CheckpointError(
                    f"{self.path}: the file ended inside tensor {name!r}, {len(view) - done} bytes short, so it was "
                    "truncated while it was read; copy or download it again"
                )
            crc = zlib.crc32(view[done : done + count], crc)
            done += count
        return RangeChecksum(begin, nbytes + done, crc)

    def pieces(self, name: str) -> Iterator[tuple[memoryview, int]]:
        """Yields the bytes of one tensor in pieces, each with the CRC-32 of the bytes so far. Reuses one buffer."""
        nbytes, read = self.layout.entries[name].nbytes, RangeChecksum(0, 0, 0)
        buffer = memoryview(bytearray(min(nbytes, PIECE_NBYTES)))
        while read.nbytes < nbytes:
            piece = buffer[: nbytes - read.nbytes]
            read = self.read_bytes(name, read, piece)
            yield piece, read.crc

    def checksum(self, name: str) -> int:
        """Returns the CRC-32 of the bytes of a tensor."""
        crc = 0
        for _, so_far in self.pieces(name):
            crc = so_far
        return crc

    def sync(self) -> None:
        """Flushes all writes to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _range_of(self, name: str, start: int, values: Tensor) -> TensorEntry:
        entry = self.layout.entries[name]
        if start < 0 or start + values.numel() > entry.numel:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {entry.numel} elements (shape {list(entry.shape)}), but elements "
                f"[{start}, {start + values.numel()}) were requested; use the config saved beside it"
            )
        return entry

    def _pwrite(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)


def _opened(path: str | os.PathLike, mode: str) -> io.FileIO:
    try:
        return cast(io.FileIO, open(path, mode, buffering=0))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found; every rank needs access to the checkpoint folder, use one that all ranks share"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); check its folder and permissions"
        ) from error


def _reserve(descriptor: int, nbytes: int) -> None:
    # Reserving also makes the file contiguous: writes into it were a third faster than into a sparse file.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _is_addressable(values: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether the tensor's memory has the file's format, so that no copy is needed."""
    return values.device.type == "cpu" and values.dtype == dtype and values.is_contiguous()


def _bytes_of(values: Tensor) -> memoryview:
    """Returns the memory of a contiguous 1-D CPU tensor of any dtype, without a copy."""
    return values.view(torch.uint8).numpy().data


def _piece_numel(values: Tensor, dtype: torch.dtype) -> int:
    return max(1, min(values.numel(), PIECE_NBYTES // dtype.itemsize))


def _outgoing(values: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yields the bytes of 1-D `values` in `dtype`: directly from memory if possible, otherwise in pieces through a
    buffer."""
    values = values.detach()
    if _is_addressable(values, dtype):
        yield _bytes_of(values)
        return
    bounce = torch.empty(_piece_numel(values, dtype), dtype=dtype)
    for first in range(0, values.numel(), len(bounce)):
        source = values[first : first + len(bounce)]
        piece = bounce[: source.numel()]
        piece.copy_(source)
        yield _bytes_of(piece)


Ranges = dict[str, list[RangeChecksum]]  # by tensor


class OpenFiles:
    """The files of a folder, a context manager. Each file is opened on first use, for reading or, if `writable`, for
    writing. Files to write must already exist with the same layout."""

    def __init__(self, folder: str | os.PathLike, files: WeightFiles, *, writable: bool = False):
        self.folder = Path(folder)
        self.files = files
        self._writable = writable
        self._open: dict[str, SafetensorsFile] = {}
        self.ranges: Ranges = {}  # ranges that this process has written or read

    def write_range(self, tensor: str, start: int, values: Tensor) -> None:
        """Calls `SafetensorsFile.write_range`, and records the range."""
        self._note(tensor, self.file_of(tensor).write_range(tensor, start, values))

    def read_range(self, tensor: str, start: int, out: Tensor) -> None:
        """Calls `SafetensorsFile.read_range`, and records the range."""
        self._note(tensor, self.file_of(tensor).read_range(tensor, start, out))

    def _note(self, tensor: str, found: RangeChecksum) -> None:
        self.ranges.setdefault(tensor, []).append(found)

    def check_shape(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises `CheckpointError` if the tensor is missing or has another shape."""
        file = self.file_of(tensor)
        found = file.layout.entries[tensor].shape
        if found != shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor!r} has shape {list(found)}, the model's has {list(shape)}; "
                "load with the config saved beside it"
            )

    def sync(self) -> None:
        """Flushes all writes to disk."""
        for file in self._open.values():
            file.sync()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()

    def file_of(self, tensor: str) -> SafetensorsFile:
        """Returns the open file of a tensor."""
        if tensor not in self.files.file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {tensor!r} is missing, found {len(self.files.file_of)} others; "
                "use a checkpoint of this model"
            )
        name = self.files.file_of[tensor]
        if name not in self._open:
            open_file = SafetensorsFile.open_for_writing if self._writable else SafetensorsFile.open
            self._open[name] = open_file(self.folder / name, self.files.layouts[name])
        return self._open[name]
