"""What others have put into a folder that a save replaces moves into the new one, or stays beside it."""

import itertools
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hf_zero.checkpoint.folders import sync_path
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.table import TABLE_NAME, ChecksumTable, is_listed, is_of_model
from hf_zero.errors import CheckpointError


logger = logging.getLogger(__name__)

OTHERS_PREFIX = "_others-"  # Trainer uploads nothing that begins so


def keep_others(former: Path, folder: Path) -> bool:
    """Moves what no save has written from a folder that was replaced into the new one. Nothing is read or copied, and
    links stay links. What cannot move stays in a folder `_others-...`, with a warning: no save fails for it.

    Returns:
        `bool`: whether `former` is to be removed.
    """
    try:
        table = ChecksumTable.read(former)
    except CheckpointError:  # nobody knows what was saved there
        return True
    files = (os.path.relpath(path, former) for path in former.rglob("*") if path.is_file())
    if table is None and any(name == MANIFEST_NAME or is_of_model(name) for name in files):
        return True  # another program's checkpoint, or one that was broken off
    saved = {TABLE_NAME, *(table.files if table is not None else ())}
    left = list(_move(former, folder, "", saved))
    if not left:
        return True
    names = (
        f"{OTHERS_PREFIX}{folder.name}{end}" for end in itertools.chain([""], map("-{}".format, itertools.count(2)))
    )
    aside = next(path for path in map(former.with_name, names) if not os.path.lexists(path))
    try:
        os.rename(former, aside)
        for name in saved:
            if not (aside / name).is_dir():
                (aside / name).unlink(missing_ok=True)
    except OSError as error:
        left.append(f"{former} ({error.strerror})")
    logger.warning(
        "%s: saved, but %s could not be moved there from the folder that it replaces, and is in %s; move it by hand",
        *(folder, left[0], aside),
    )
    return False


def _move(former: Path, folder: Path, below: str, saved: Collection[str]) -> Iterator[str]:
    """Moves the entries of one folder, and yields what could not move, with the reason."""
    for source in sorted((former / below).iterdir()):
        name, target = os.path.join(below, source.name), folder / below / source.name
        is_folder = source.is_dir() and not source.is_symlink()
        if name in saved and not is_folder:
            continue
        try:
            if is_folder and (target.is_dir() or any(each.startswith(f"{name}/") for each in saved)):
                yield from _move(former, folder, name, saved)
            elif not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(source, target)
                sync_path(target.parent)
            elif is_listed(name):  # of the rest a save may have written the former one, too
                yield f"{name} (the save has one of that name)"
        except FileNotFoundError:  # somebody was faster
            continue
        except OSError as error:
            yield f"{name} ({error.strerror})"
