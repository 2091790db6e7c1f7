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


class InertRecord:
    """Replaces a class of another program: stores the data without running code."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_safely(path: Path, device: torch.device | str = "cpu", *, mmap: bool = False) -> Any:
    """Loads a `torch.save` file, with `mmap` without reading its tensors. DeepSpeed classes in it (its loss scaler, an
    enum) become [`InertRecord`]s. Raises [`CheckpointError`] if it is missing, damaged, or refers to other code."""
    with in_one_line(path):
        unknown = get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in unknown if not name.startswith("deepspeed.")]
        if foreign:
            raise refusal(path, foreign[0])
        with safe_globals([(type("InertRecord", (InertRecord,), {}), name) for name in unknown]):
            location = "cpu" if torch.device(device).type == "cpu" else device  # torch.load does not support cpu:0
            return torch.load(path, map_location=location, mmap=mmap or None, weights_only=True)


def check_archive(path: Path) -> None:
    """Checks that a `torch.save` file is complete, without loading it. Raises [`CheckpointError`]."""
    with in_one_line(path):
        zipfile.ZipFile(path).close()  # its directory is at the end


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
