"""Atomic creation and removal of folders by renaming, and small files in them."""

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path

from hf_zero.errors import CheckpointError


logger = logging.getLogger(__name__)

# Trainer does not upload files and folders whose names begin with an underscore.
STAGED_PREFIX = "_saving-"
_REPLACED_PREFIX = "_replaced-"
_REMOVING_PREFIX = "_removing-"


def make_folder(folder: Path) -> None:
    """Creates a folder with its parents, and flushes the directory entries to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_path(path.parent)


def commit(staged: Path, destination: Path) -> None:
    """Flushes a complete folder to disk and renames it to `destination`. An existing destination is renamed before and
    removed afterwards. If the process is killed between the renames, `recover` restores it."""
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
    """Restores folders whose replacement was interrupted, and deletes folders whose removal was interrupted. Any rank
    may call it."""
    for replaced in folder.glob(f"{_REPLACED_PREFIX}*"):
        destination = folder / replaced.name.removeprefix(_REPLACED_PREFIX)
        if destination.exists():
            _remove_replaced(replaced)
            continue
        with contextlib.suppress(OSError):  # another rank has renamed it
            os.rename(replaced, destination)
    for removing in folder.glob(f"{_REMOVING_PREFIX}*"):
        shutil.rmtree(removing, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder. Renames it first, so that an interruption leaves no incomplete folder under its name."""
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
        replaced.unlink(missing_ok=True)  # keeps the target of the link
    elif replaced.exists():
        remove_folder(replaced)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically: a reader finds either the old or the new content, also after a crash."""
    new = path.with_name(f"_{path.name}.new")  # Trainer does not upload names that begin with an underscore
    try:
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_path(path.parent)


def read_json(path: str | os.PathLike, remedy: str = "resume from another checkpoint") -> dict:
    """Returns the object in a JSON file. Raises `FileNotFoundError` if the file does not exist, and
    [`CheckpointError`] if it cannot be read, is not valid JSON, or is not an object."""
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: found a {type(found).__name__}, expected an object; {remedy}")
    return found


def sync_path(path: Path) -> None:
    """Flushes a file or the entries of a folder to disk."""
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
