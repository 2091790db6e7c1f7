"""The open safetensors files of one folder, addressed by tensor."""

import os
from pathlib import Path
from types import TracebackType

from torch import Tensor

from hf_zero.checkpoint.safetensors_file import SafetensorsFile
from hf_zero.checkpoint.weight_files import WeightFiles
from hf_zero.errors import CheckpointError


class OpenFiles:
    """The files of a folder, each opened when its first tensor is asked for. A context manager.

    Args:
        folder (`str` or `os.PathLike`): where they lie.
        files (`WeightFiles`): what they hold.
        writable (`bool`): whether they were created with this layout and are to be written, or are read.
    """

    def __init__(self, folder: str | os.PathLike, files: WeightFiles, *, writable: bool = False):
        self.folder = Path(folder)
        self.files = files
        self._writable = writable
        self._open: dict[str, SafetensorsFile] = {}
        self.written_nbytes: dict[str, int] = {}  # by tensor, this process's part

    def write_range(self, tensor: str, start: int, values: Tensor) -> None:
        """See `SafetensorsFile.write_range`; counts what it wrote."""
        nbytes = self._file(tensor).write_range(tensor, start, values)
        self.written_nbytes[tensor] = self.written_nbytes.get(tensor, 0) + nbytes

    def read_range(self, tensor: str, start: int, out: Tensor) -> None:
        """See `SafetensorsFile.read_range`."""
        self._file(tensor).read_range(tensor, start, out)

    def check_shape(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises `CheckpointError` where the files have the tensor in another shape, or not at all."""
        file = self._file(tensor)
        found = file.layout.entries[tensor].shape
        if found != shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor!r} has shape {list(found)}, the model's has {list(shape)}; "
                "load with the config saved beside it"
            )

    def sync(self) -> None:
        """Returns when everything that was written here has reached the disk."""
        for file in self._open.values():
            file.sync()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()

    def _file(self, tensor: str) -> SafetensorsFile:
        if tensor not in self.files.file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {tensor!r} is missing, its files hold {len(self.files.file_of)} others; "
                "use a checkpoint of this model"
            )
        name = self.files.file_of[tensor]
        if name not in self._open:
            open_file = SafetensorsFile.open_for_writing if self._writable else SafetensorsFile.open
            self._open[name] = open_file(self.folder / name, self.files.layouts[name])
        return self._open[name]
