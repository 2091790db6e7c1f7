"""Folders that get their names when they are complete, and lose them before they are removed; small files in them."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from pathlib import Path, PurePosixPath
from typing import Any

from hf_zero.errors import CheckpointError


logger = logging.getLogger(__name__)

# Names that begin with an underscore are left out when Trainer uploads its output folder.
STAGED_PREFIX = "_saving-"
REPLACED_PREFIX = "_replaced-"
REMOVING_PREFIX = "_removing-"
LOCK_NAME = ".lock"
# Where a lock says nothing, a folder is taken for left over when nothing in it has changed for so long.
ABANDONED_SECONDS = 24 * 3600.0


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, and flushes their names to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_path(path.parent)


def make_staged(folder: Path) -> int:
    """Makes a temporary folder for a save. Returns a descriptor that marks it as in use until it is closed, or its
    process ends however it does."""
    folder.mkdir()
    # A file of its own: network file systems lock no folders, and nothing that is not open for writing.
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    _lock(descriptor)
    return descriptor


def take_name(staged: Path, destination: Path) -> None:
    """Gives a staged folder its name. A folder that has the name already is renamed, and stays until
    `remove_replaced`."""
    replaced = _replaced(destination)
    remove_replaced(destination)
    if not destination.exists():
        os.rename(staged, destination)
        return
    lock = os.open(destination, os.O_RDONLY)
    _lock(lock)  # another save in the same folder is not to give it its name back meanwhile
    try:
        os.rename(destination, replaced)
        try:
            os.rename(staged, destination)
        except OSError:
            os.rename(replaced, destination)
            raise
    finally:
        os.close(lock)


def remove_replaced(destination: Path) -> None:
    """Removes the folder that `take_name` has replaced."""
    replaced = _replaced(destination)
    if replaced.is_symlink():
        replaced.unlink(missing_ok=True)  # what it leads to keeps its own name
    elif replaced.exists() and destination.exists():
        remove_folder(replaced)


def restore_replaced(folder: Path) -> None:
    """Restores the names of folders that `take_name` had renamed when it was killed. Any rank may call it."""
    for replaced in folder.glob(f"{REPLACED_PREFIX}*"):
        destination = _destination(replaced)
        # Where locks do not work it is done all the same: a save that this disturbs fails, and nothing is lost.
        if not destination.exists() and _is_locked(replaced) is not True:
            with contextlib.suppress(OSError):  # another rank was faster
                os.rename(replaced, destination)


def remove_folder(folder: Path) -> None:
    """Removes a complete folder. It loses its name first: a kill on the way leaves nothing incomplete under it."""
    removing = folder.with_name(f"{REMOVING_PREFIX}{folder.name}")
    shutil.rmtree(removing, ignore_errors=True)
    try:
        os.rename(folder, removing)
        sync_path(folder.parent)
    except OSError as error:
        logger.warning("%s: cannot be removed (%s); remove it by hand", folder, error.strerror)
        return
    shutil.rmtree(removing, ignore_errors=True)


def remove_left_over(folder: Path) -> None:
    """Removes the temporary files of saves that were killed, and keeps those of saves under way."""
    restore_replaced(folder)
    for removing in folder.glob(f"{REMOVING_PREFIX}*"):
        shutil.rmtree(removing, ignore_errors=True)
    for staged in folder.glob(f"{STAGED_PREFIX}*"):
        if _is_left_over(staged, staged / LOCK_NAME):
            shutil.rmtree(staged, ignore_errors=True)
    for replaced in folder.glob(f"{REPLACED_PREFIX}*"):
        if _is_left_over(replaced, replaced):
            remove_replaced(_destination(replaced))


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


def _replaced(destination: Path) -> Path:
    return destination.with_name(f"{REPLACED_PREFIX}{destination.name}")


def _destination(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(REPLACED_PREFIX))


def _is_left_over(folder: Path, lock: Path) -> bool:
    is_locked = _is_locked(lock)
    if is_locked is not None:
        return not is_locked
    try:
        newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # something in it came or went just now
        return False
    return time.time() - newest > ABANDONED_SECONDS


def _is_locked(path: Path) -> bool | None:
    """Whether a save holds the lock of a folder. It is `None` where that is unknown: there is no lock yet, or the file
    system has none."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except OSError:
        return None
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Locks a file or folder, and returns whether another process has locked it; `None` on a file system without
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
