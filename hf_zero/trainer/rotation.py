"""Which checkpoints go when there are more than `--save_total_limit`."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from hf_zero.checkpoint import Manifest
from hf_zero.checkpoint.folders import remove_folder
from hf_zero.errors import CheckpointError


_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first, by their steps: dates change when folders are copied."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=age_of, reverse=True)


def age_of(checkpoint: Path) -> tuple[int, str]:
    """A key that sorts checkpoints, the oldest first: the optimizer steps that a name tells, then the name.
    `checkpoint-5` and `checkpoint-05` tell the same, and all ranks are to have them in the same order."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None, f"{checkpoint} is no checkpoint's name"
    return int(found[1]), checkpoint.name


def rotation(run_dir: str, limit: int | None, best: str | None, newest: str) -> Callable[[], None]:
    """Deletes the checkpoints with the fewest steps beyond `limit`; to be called when `newest` is complete.

    Whatever the limit, these stay: `newest`, `best`, and the newest that is known to be finite, so that a run whose
    loss has become NaN does not push out the last checkpoint that is of use.

    Args:
        run_dir (`str`): where the checkpoints lie.
        limit (`int`, *optional*): how many stay; `None` or 0: all.
        best (`str`, *optional*): the best checkpoint so far.
        newest (`str`): the one that has just been saved. A run that went on from an older one may have others with
            more steps.
    """
    return partial(_rotate, Path(run_dir), limit or 0, Path(newest), Path(best) if best else None)


def keep_best(run_dir: str, best: str) -> None:
    """Deletes all checkpoints but the best at the end of a run, as Trainer does with a limit of one. Where the best is
    not known to be finite, the newest that is stays too."""
    found, kept = _own(Path(run_dir)), [Path(best)]
    if not is_known_finite(kept[0]):
        kept += _newest_finite(found)
    _remove_oldest(found, 1, kept)


def is_known_finite(checkpoint: Path) -> bool:
    """Whether loss and gradient norm of a checkpoint's last step were numbers, by its manifest."""
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError:
        return False
    return manifest.loss is not None and manifest.grad_norm is not None


def _rotate(folder: Path, limit: int, newest: Path, best: Path | None) -> None:
    found, kept = _own(folder), [newest, *([best] if best else [])]
    if 0 < limit < len(found):
        _remove_oldest(found, limit, [*kept, *_newest_finite([newest, *found])])


def _own(folder: Path) -> list[Path]:
    """Without links, which are the user's: to a checkpoint on another disk, say."""
    return [path for path in checkpoints_in(folder) if not path.is_symlink()]


def _newest_finite(checkpoints: Iterable[Path]) -> list[Path]:
    return [path for path in checkpoints if is_known_finite(path)][:1]


def _remove_oldest(found: list[Path], limit: int, kept: Iterable[Path]) -> None:
    kept_names = {path.name for path in kept}
    removable = [path for path in reversed(found) if path.name not in kept_names]
    for path in removable[: max(len(found) - limit, 0)]:
        remove_folder(path)
