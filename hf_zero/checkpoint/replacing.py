"""A save into a folder that holds something: its files take their names there one by one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.checkpoint.staging import Staged, connected
from hf_zero.checkpoint.table import CARD_NAME, TABLE_NAME, ChecksumTable
from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError


@contextmanager
def inside(staged: Path, folder: Path, *, replaces: Callable[[str], bool]) -> Iterator[None]:
    """While files of a staged folder take their names in one that holds something, the latter has no checksums: no
    moment's mixture of both is taken for damage. Afterwards they are those of all files that were saved there.

    Args:
        staged (`Path`): the temporary folder, with its own table.
        folder (`Path`): the destination.
        replaces (`Callable[[str], bool]`): says of a file of a former save whether it goes now.
    """
    new = ChecksumTable.read(staged)
    assert new is not None, f"{staged} has no table"
    try:
        before = ChecksumTable.read(folder) or ChecksumTable()
    except CheckpointError:  # whatever was wrong there: what is saved now is known
        before = ChecksumTable()
    (folder / TABLE_NAME).unlink(missing_ok=True)
    yield
    before.replaced(new, gone=filter(replaces, before.files)).write(folder)


def move_into(source: Path, target: Path) -> None:
    """Gives a file its name in a folder that holds something, or every file below a folder."""
    if not source.is_dir():
        os.replace(source, target)
        return
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        move_into(path, target / path.name)


@contextmanager
def added(comm: Comm, folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder for small files that are added to what `folder` holds, with their checksums. Collective; any
    rank may write into it, and what one of them cannot do all of them hear of before its end.

    Args:
        comm (`Comm`): the ranks.
        folder (`str` or `os.PathLike`): the destination, made where it is missing.
    """
    staged = Staged.open(connected(comm), folder, [], inside=True)
    try:
        yield staged.path
    except BaseException:
        staged.discard()
        raise
    staged.publish(lambda path: _add(path, staged.destination))


def _add(staged: Path, folder: Path) -> None:
    with inside(staged, folder, replaces=lambda name: False):
        for path in staged.iterdir():
            is_kept = path.name == CARD_NAME and (folder / path.name).exists()
            if path.name != TABLE_NAME and not is_kept:
                move_into(path, folder / path.name)
