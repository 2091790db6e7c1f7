"""Writing and reading of tensor ranges in the safetensors files of a folder.

All offsets follow from the layout (see `FileLayout`), so any number of processes can write their own ranges of one
file.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hf_zero.checkpoint.format import FileLayout, RangeChecksum, WeightFiles
from hf_zero.errors import CheckpointError, size_text


# Size of the pieces that are read, converted and copied from a device: a full tensor is never held twice, and a piece
# is still in the CPU cache when its checksum is computed.
PIECE_NBYTES = 4 * 2**20

Ranges = dict[str, list[RangeChecksum]]  # by tensor


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
