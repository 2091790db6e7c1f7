"""Reads files of `torch.save` without running code from them: `torch.load` gets `weights_only=True` throughout."""

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


class InertRecord:
    """Stands for a class of another program: it keeps the data and runs nothing."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_mapped(path: Path) -> Any:
    """Loads a file of `torch.save`, its tensors mapped and not read. Classes of DeepSpeed that it names (its loss
    scaler, an enumeration) become [`InertRecord`]s. Raises [`CheckpointError`] where it is missing, damaged, of the
    format before torch 1.6, or names code that is not known to be harmless."""
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
    """Loads a small file of `torch.save`, which takes no more memory than it has bytes. Raises as `load_mapped`."""
    check_archive(path)
    with in_one_line(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def load_archive(path: Path, device: torch.device) -> Any:
    """Loads a file of `torch.save` of any size, its tensors onto a device. Raises as `load_mapped`, and where it does
    not agree with its own checksums."""
    with in_one_line(path):
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
    with in_one_line(path):
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


@contextmanager
def in_one_line(path: Path | str) -> Iterator[None]:
    """Turns every error into one line: damaged files fail in every way there is."""
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
    """Returns the error for a file that names what is not known to be harmless."""
    return CheckpointError(
        f"{path}: names {name}, which may run code when it is loaded, so it is not; "
        "give a checkpoint of tensors and numbers only"
    )
