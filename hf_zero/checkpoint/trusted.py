"""Safe loading of `torch.save` files: all calls of `torch.load` use `weights_only=True`."""

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from hf_zero.errors import CheckpointError


# Limit for schedules and states of generators, which have a few KiB.
MAX_SMALL_NBYTES = 64 * 2**20


class InertRecord:
    """Replaces a class of another program: stores the data without running code."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_mapped(path: Path) -> Any:
    """Loads a `torch.save` file with memory-mapped tensors. DeepSpeed classes in it (its loss scaler, an enum) become
    [`InertRecord`]s. Raises [`CheckpointError`] if it is missing, damaged, in the format before torch 1.6, or refers
    to other code."""
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; copy all files of the checkpoint")
    with in_one_line(path):
        unknown = get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in unknown if not name.startswith("deepspeed.")]
        if foreign:
            raise refusal(path, foreign[0])
        with safe_globals([(type("InertRecord", (InertRecord,), {}), name) for name in unknown]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_small(path: Path) -> Any:
    """Loads a small `torch.save` file, after a check that it takes no more memory than its size. Raises like
    `load_mapped`."""
    check_archive(path)
    with in_one_line(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def load_archive(path: Path, device: torch.device) -> Any:
    """Loads a `torch.save` file of any size onto a device. Raises like `load_mapped`, and if the file's checksums do
    not match."""
    with in_one_line(path):
        with zipfile.ZipFile(path) as archive:
            _ignore_absent_checksums(archive)
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"{path}: its member {damaged} is damaged; copy it again")
        location = "cpu" if device.type == "cpu" else device  # torch.load does not support accelerate's cpu:0
        return torch.load(path, map_location=location, weights_only=True)


def check_archive(path: Path) -> None:
    """Checks that a file is a small, undamaged `torch.save` file, and does not allocate more memory than its size.
    Loads nothing. Raises [`CheckpointError`] if it is empty, truncated, damaged, too large, compressed, or refers to
    `bytearray`."""
    with in_one_line(path):
        nbytes = path.stat().st_size
        if nbytes > MAX_SMALL_NBYTES:
            raise CheckpointError(f"{path}: has {nbytes} bytes, expected a few thousand; copy it again")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            held = sum(member.file_size for member in members)
            if held > nbytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CheckpointError(
                    f"{path}: unpacks to {held} bytes, more than its size of {nbytes}; copy it again"
                )
            _ignore_absent_checksums(archive)
            contents = [(member.filename, archive.read(member)) for member in members]
    # torch allows a file to create a bytearray of any size
    if any(name.endswith(".pkl") and b"bytearray" in content for name, content in contents):
        raise CheckpointError(f"{path}: refers to bytearray, which no such file uses; copy it again")


def _ignore_absent_checksums(archive: zipfile.ZipFile) -> None:
    for member in archive.infolist():
        crc: Any = member.CRC or None  # 0: torch was configured to write no checksums
        member.CRC = crc


@contextmanager
def in_one_line(path: Path | str) -> Iterator[None]:
    """Converts all exceptions, which damaged files may raise, to [`CheckpointError`] with a message of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if unknown := re.search(r"GLOBAL ([\w.]+)", text):
            raise refusal(path, unknown.group(1)) from error
        raise CheckpointError(
            f"{path}: cannot be read ({text[:160]}); it is damaged or incomplete, copy it again"
        ) from error


def refusal(path: Path | str, name: str) -> CheckpointError:
    """Returns the error for a file that refers to code not known to be safe."""
    return CheckpointError(
        f"{path}: refers to {name}, which may run code when it is loaded; "
        "use a checkpoint with only tensors and numbers"
    )
