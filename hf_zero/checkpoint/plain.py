"""Reading what somebody else may have written: JSON of bounded size and depth, and names that stay in their folder."""

import json
import os
from pathlib import PurePosixPath
from typing import Any

from hf_zero.errors import CheckpointError


# The longest that belongs to a checkpoint is the log of a run: some hundred bytes for each logged step.
MAX_JSON_NBYTES = 512 * 2**20


def read_json(path: str | os.PathLike, remedy: str = "resume from another checkpoint") -> dict:
    """The object that a JSON file holds.

    Args:
        path (`str` or `os.PathLike`): the file.
        remedy (`str`): the end of the message, what to do.

    Raises:
        `FileNotFoundError`: there is none.
        `CheckpointError`: it cannot be read, is no JSON, too long or nested too deeply, or is no object.
    """
    return parse_json(read_bytes(path, remedy), path, remedy)


def read_bytes(path: str | os.PathLike, remedy: str) -> bytes:
    """The content of a file that is to hold JSON, no more than is taken; see `read_json`."""
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
    """The object in a file's content; see `read_json`."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, wanted an object; {remedy}")
    return found


def is_file_name(name: Any) -> bool:
    """Whether it names a file of one folder: not a path that could lead out of it, and nothing the system refuses."""
    return is_inner_path(name) and "/" not in name and len(os.fsencode(name)) <= 255


def is_inner_path(name: Any) -> bool:
    """Whether it is a relative path that stays below the folder that it is counted from."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        os.fsencode(name)
    except ValueError:  # half a character
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and str(path) == name and name != "." and ".." not in path.parts
