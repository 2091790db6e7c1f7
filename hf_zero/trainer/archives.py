"""What Trainer keeps in a checkpoint with `torch.save`: looked at before any of it is loaded."""

import re
import zipfile
import zlib
from pathlib import Path

from torch.serialization import get_crc32_options
from transformers.trainer import SCHEDULER_NAME

from hf_zero.errors import CheckpointError


RNG_STATES = re.compile(r"rng_state(_\d+)?\.pth")


def check_archives(folder: str | Path) -> None:
    """Checks that the schedule and the random states of a checkpoint can be read; those that are there.

    Args:
        folder (`str` or `Path`): the checkpoint.

    Raises:
        `CheckpointError`: naming the file that is empty, cut off or damaged.
    """
    for path in sorted(Path(folder).iterdir()):
        if path.name == SCHEDULER_NAME:
            _check(path, whole=get_crc32_options())  # else torch writes no checksums that others can check
        elif RNG_STATES.fullmatch(path.name):
            _check(path, whole=False)  # every rank looks at those of all


def _check(path: Path, *, whole: bool) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if whole else None
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        size = f"{path.stat().st_size} bytes" if path.exists() else "no file"
        raise CheckpointError(
            f"{path}: cannot be read ({size}; {' '.join(str(error).split())}); resume from another checkpoint"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path}: {damaged} was damaged since it was saved; resume from another checkpoint")
