"""Folders that get their names when they are complete and on disk, and lose them before they are removed; small files
in them."""

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from hf_zero.errors import CheckpointError


logger = logging.getLogger(__name__)

# Trainer does not upload files and folders whose names begin with an underscore.
STAGED_PREFIX = "_saving-"
_REPLACED_PREFIX = "_replaced-"
_REMOVING_PREFIX = "_removing-"


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, and flushes their names to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_path(path.parent)


def commit(staged: Path, destination: Path) -> None:
    """Flushes a complete folder to disk and gives it its name. The folder that had the name is removed afterwards; a
    kill between the two renames leaves it for `recover`."""
    sync_all(staged)
    replaced = destination.with_name(f"{_REPLACED_PREFIX}{destination.name}")
    if destination.exists():
        os.rename(destination, replaced)
    try:
        os.rename(staged, destination)
    except OSError:
        if replaced.exists():
            os.rename(replaced, destination)
        raise
    sync_path(destination.parent)
    _remove_replaced(replaced)


def recover(folder: Path) -> None:
    """Gives folders their names back that were being replaced when a save was killed, and removes what is left of
    folders that have lost their names. Any rank may call it."""
    for replaced in folder.glob(f"{_REPLACED_PREFIX}*"):
        destination = folder / replaced.name.removeprefix(_REPLACED_PREFIX)
        if destination.exists():
            _remove_replaced(replaced)
            continue
        with contextlib.suppress(OSError):  # another rank was faster
            os.rename(replaced, destination)
    for removing in folder.glob(f"{_REMOVING_PREFIX}*"):
        shutil.rmtree(removing, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a complete folder. It loses its name first: a kill on the way leaves nothing incomplete under it."""
    removing = folder.with_name(f"{_REMOVING_PREFIX}{folder.name}")
    shutil.rmtree(removing, ignore_errors=True)
    try:
        os.rename(folder, removing)
        sync_path(folder.parent)
    except OSError as error:
        logger.warning("%s: cannot be removed (%s); remove it by hand", folder, error.strerror)
        return
    shutil.rmtree(removing, ignore_errors=True)


def _remove_replaced(replaced: Path) -> None:
    if replaced.is_symlink():
        replaced.unlink(missing_ok=True)  # the folder that it leads to stays
    elif replaced.exists():
        remove_folder(replaced)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader finds either the old content or the new one, also after a crash. Another file
    stands beside it for a moment."""
    new = path.with_name(f"_{path.name}.new")  # Trainer uploads nothing that begins so
    try:
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_path(path.parent)


# The longest that belongs to a checkpoint is the log of a run: some hundred bytes for each logged step.
MAX_JSON_NBYTES = 512 * 2**20


def read_json(path: str | os.PathLike, remedy: str = "resume from another checkpoint") -> dict:
    """Returns the object that a JSON file holds. Raises `FileNotFoundError` where there is none, and
    [`CheckpointError`] where it cannot be read, is no JSON, too long or nested too deeply, or is no object."""
    return parse_json(read_bytes(path, remedy), path, remedy)


def read_bytes(path: str | os.PathLike, remedy: str) -> bytes:
    """Returns the content of a JSON file, up to a limit; see `read_json`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_JSON_NBYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); {remedy}") from error
    if len(content) > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path}: has more than {MAX_JSON_NBYTES} bytes, which no run writes; {remedy}")
    return content


def parse_json(content: bytes, path: str | os.PathLike, remedy: str) -> dict:
    """Returns the object in the content of a JSON file; see `read_json`."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, wanted an object; {remedy}")
    return found


def is_file_name(name: Any) -> bool:
    """Whether a text is the name of a file in one folder: not a path out of it, and nothing that the system
    refuses."""
    return is_inner_path(name) and "/" not in name and len(os.fsencode(name)) <= 255


def is_inner_path(name: Any) -> bool:
    """Whether a text is a relative path that stays below its folder."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        os.fsencode(name)
    except ValueError:  # half a character
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and str(path) == name and name != "." and ".." not in path.parts


def sync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Flushes a folder with everything in it to disk."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
