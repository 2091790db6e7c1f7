"""New files grow in a temporary folder inside their destination, and get their names when they are complete."""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from hf_zero.checkpoint.agreement import gathered, on_first, together
from hf_zero.checkpoint.open_files import OpenFiles
from hf_zero.checkpoint.safetensors_file import SafetensorsFile
from hf_zero.checkpoint.weight_files import WeightFiles
from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError


_PREFIX = ".saving-"


def write_together(
    comm: Comm,
    folder: str | os.PathLike,
    files: WeightFiles,
    pieces: Iterable[tuple[str, int, Tensor]],
    *,
    write_beside: Callable[[Path], None],
    publish: Callable[[Path], None],
) -> None:
    """Writes safetensors files from all ranks at once, each its own ranges, and publishes them when all is on disk.

    Collective. When it fails on any rank it raises on all; what `folder` held stays untouched, nothing is left over.

    Args:
        comm (`Comm`): the ranks; all of them see `folder`.
        folder (`str` or `os.PathLike`): the destination, created where it is missing.
        files (`WeightFiles`): the files, the same on all ranks.
        pieces (`Iterable`): this rank's (tensor name, first element, 1-D values); together they tile all tensors.
        write_beside (`Callable`): on rank 0, writes the small files into the temporary folder.
        publish (`Callable`): on rank 0, moves everything from the temporary folder to its place.

    Raises:
        `CheckpointError`: no room, no permission, a folder that the ranks do not share, elements that nobody wrote.
    """
    folder = Path(folder)
    subject = f"saving to {folder}"
    staged = gathered(comm, subject, on_first(comm, lambda: _stage(folder, files)))[0]
    try:
        beside = on_first(comm, lambda: write_beside(staged))
        written = gathered(comm, subject, lambda: _write(staged, files, pieces, beside))
        _check_complete(written, files, subject)
        together(comm, subject, on_first(comm, lambda: _publish(staged, folder, publish)))
    finally:
        if comm.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)


def _stage(folder: Path, files: WeightFiles) -> Path:
    """Creates the temporary folder and, at their full size, the files in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_by_killed_run in folder.glob(f"{_PREFIX}*"):
        shutil.rmtree(left_by_killed_run, ignore_errors=True)
    free_nbytes = shutil.disk_usage(folder).free
    if free_nbytes < files.nbytes:
        raise CheckpointError(
            f"{folder}: saving takes {files.nbytes} bytes, {free_nbytes} are free; "
            "free space there or save to another folder"
        )
    staged = folder / f"{_PREFIX}{secrets.token_hex(4)}"
    staged.mkdir()
    try:
        for name, layout in files.layouts.items():
            SafetensorsFile.create(staged / name, layout).close()
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return staged


def _write(
    staged: Path, files: WeightFiles, pieces: Iterable[tuple[str, int, Tensor]], beside: Callable[[], None]
) -> dict[str, int]:
    """This rank's part of the bytes, flushed to disk. Returns how many it wrote of each tensor."""
    beside()
    with OpenFiles(staged, files, writable=True) as opened:
        for tensor, start, values in pieces:
            opened.write_range(tensor, start, values)
        opened.sync()
        return opened.written_nbytes


def _check_complete(written: list[dict[str, int]], files: WeightFiles, subject: str) -> None:
    """The file was reserved full of zeros: a range that nobody wrote would go unnoticed for ever."""
    total: Counter[str] = Counter()
    for nbytes_of in written:
        total.update(nbytes_of)
    for name in files.file_of:
        expected = files.entry(name).nbytes
        if total[name] != expected:
            raise CheckpointError(
                f"{subject}: the ranks wrote {total[name]} of the {expected} bytes of tensor {name!r}, nothing was "
                "saved; this is a fault of hf_zero, please report it with the model and the number of ranks"
            )


def _publish(staged: Path, folder: Path, publish: Callable[[Path], None]) -> None:
    for path in staged.rglob("*"):
        if path.is_file():
            _sync(path)
    publish(staged)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
