"""The open safetensors files of one folder, addressed by tensor."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from hf_zero.checkpoint.checksum import MANY, RangeChecksum, crc_of_whole
from hf_zero.checkpoint.safetensors_file import SafetensorsFile
from hf_zero.checkpoint.weight_files import WeightFiles
from hf_zero.comm import Comm
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.errors import CheckpointError


# A transposed tensor is written row by row: its ranges would take more memory than the tensor.
MAX_RANGES = 1000
Ranges = dict[str, list[RangeChecksum]]  # by tensor


class OpenFiles:
    """The files of a folder, each opened when its first tensor is asked for. A context manager.

    Args:
        folder (`str` or `os.PathLike`): where they lie.
        files (`WeightFiles`): what they hold.
        writable (`bool`): whether they were created with this layout and are to be written, or are read.
        keeps_all (`bool`): notes every range; otherwise no more than `MAX_RANGES` of a tensor, and then their sum.
    """

    def __init__(
        self, folder: str | os.PathLike, files: WeightFiles, *, writable: bool = False, keeps_all: bool = False
    ):
        self.folder = Path(folder)
        self.files = files
        self._writable = writable
        self._keeps_all = keeps_all
        self._open: dict[str, SafetensorsFile] = {}
        self.ranges: Ranges = {}  # what this process has written or read

    def write_range(self, tensor: str, start: int, values: Tensor) -> None:
        """See `SafetensorsFile.write_range`; the range is noted."""
        self.note(tensor, self._file(tensor).write_range(tensor, start, values))

    def write_bytes(self, tensor: str, after: RangeChecksum, view: memoryview) -> RangeChecksum:
        """See `SafetensorsFile.write_bytes`; the caller notes the range when it is whole."""
        return self._file(tensor).write_bytes(tensor, after, view)

    def read_bytes(self, tensor: str, begin: int, view: memoryview) -> None:
        """See `SafetensorsFile.read_bytes`."""
        self._file(tensor).read_bytes(tensor, begin, view)

    def read_range(self, tensor: str, start: int, out: Tensor) -> None:
        """See `SafetensorsFile.read_range`; the range is noted."""
        self.note(tensor, self._file(tensor).read_range(tensor, start, out))

    def checksum(self, tensor: str) -> int:
        """See `SafetensorsFile.checksum`."""
        return self._file(tensor).checksum(tensor)

    def note(self, tensor: str, found: RangeChecksum) -> None:
        """Takes a range of a tensor into `ranges`."""
        noted = self.ranges.setdefault(tensor, [])
        noted.append(found)
        if not self._keeps_all and (len(noted) > MAX_RANGES or noted[0].begin == MANY):
            noted[:] = [RangeChecksum(MANY, sum(part.nbytes for part in noted), 0)]

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


def check_ranges(
    comm: Comm,
    subject: str,
    ranges: Iterable[Ranges],
    files: WeightFiles,
    checksums: Mapping[str, Mapping[str, int]],
    folder: str | os.PathLike,
) -> None:
    """Compares what was read with what was written. Collective.

    A tensor that the ranks have read in ranges that do not add up to it (one that is transposed on loading) is read
    again for its checksum, by one of them.

    Args:
        comm (`Comm`): the ranks.
        subject (`str`): for messages.
        ranges (`Iterable[Ranges]`): what each rank has read. A tensor that none has read is not compared.
        files (`WeightFiles`): the files that they were read from.
        checksums (`Mapping`): file to tensor to CRC-32 of its bytes when it was saved.
        folder (`str` or `os.PathLike`): where the files lie.

    Raises:
        `CheckpointError`: naming the file and the tensor whose bytes have changed.
    """
    ranges = list(ranges)
    again: list[str] = []
    for tensor, name in files.file_of.items():
        expected = checksums.get(name, {}).get(tensor)
        parts = [part for ranges_of_rank in ranges for part in ranges_of_rank.get(tensor, ())]
        if expected is None or not parts:
            continue
        found = crc_of_whole(parts, files.entry(tensor).nbytes)
        if found is None:
            again.append(tensor)
        elif found != expected:
            raise _damaged(Path(folder) / name, tensor, found, expected)

    def check_own() -> None:
        with OpenFiles(folder, files) as opened:
            for tensor in again[comm.rank :: comm.num_ranks]:
                name = files.file_of[tensor]
                found, expected = opened.checksum(tensor), checksums[name][tensor]
                if found != expected:
                    raise _damaged(Path(folder) / name, tensor, found, expected)

    if again:
        run_on_all_ranks(comm, subject, check_own)


def _damaged(path: Path, tensor: str, found: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {tensor!r} has checksum {found:08x}, it was saved with {expected:08x}: the file was damaged "
        "since; resume from another checkpoint"
    )
