"""Disk space: it is checked before the first step, and waited for when it is missing for a save.

It is made by deleting old checkpoints, where there are more than `--save_total_limit`.
"""

import errno
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import Manifest, plan_weights
from hf_zero.checkpoint.adapters import is_adapter_model
from hf_zero.checkpoint.folders import remove_folder
from hf_zero.checkpoint.state import masters_nbytes
from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks, on_first
from hf_zero.errors import CheckpointError, CommError, NoRoomError, causes, size_text
from hf_zero.trainer.signals import StopOnSignal, Stopped
from hf_zero.trainer.trainer_base import ZeroTrainerBase
from hf_zero.trainer.whole import saves_whole


logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SAY_SECONDS = 60.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"checkpoint-(\d+)")


def check_room(trainer: ZeroTrainerBase) -> None:
    """Checks, before the first step, that the files that the run will save fit its disk. All ranks call it. Raises
    [`CheckpointError`] where there is no room for one checkpoint, and the model at the end where that will be
    saved."""
    args = trainer.args
    num_saved = _num_checkpoints(args, trainer.state)
    if not num_saved and not trainer.leaves_model:
        return
    engine = trainer._engine
    # an adapter is small, and what it takes is known when PEFT writes it
    model = 0 if is_adapter_model(trainer.model) else plan_weights(engine).files.nbytes
    checkpoint = model * (1 + saves_whole(type(trainer)))
    checkpoint += 0 if args.save_only_model else state_nbytes(trainer)
    final = model * trainer.leaves_model
    folder = Path(args.output_dir)
    free = min(collect_from_all_ranks(engine.comm, f"looking at {folder}", lambda: _free_nbytes(folder)))
    needed = (checkpoint if num_saved else 0) + final
    if free < needed:
        raise CheckpointError(
            f"{folder}: the run will save {size_text(needed)} at least, {size_text(free)} are free; free space there "
            "or give another output_dir"
        )
    whole = checkpoint * num_saved + final
    if free < whole and args.process_index == 0:
        logger.warning(
            "%s: %d checkpoints of %s will not fit with the %s that are free; save_total_limit deletes old ones, "
            "save_only_model leaves their state out",
            folder,
            num_saved,
            size_text(checkpoint),
            size_text(free),
        )


def state_nbytes(trainer: ZeroTrainerBase) -> int:
    """Returns the bytes of masters and optimizer state in a checkpoint. All ranks call it. Before the first step the
    state of optimizers that are not elementwise is unknown."""
    engine, optimizer = trainer._engine, trainer._prepared_optimizer
    own = sum(numel * dtype.itemsize for dtype, numel, _ in optimizer.expected_state())
    held = collect_from_all_ranks(
        engine.comm, "looking at the optimizer's state", lambda: (own, masters_nbytes(engine))
    )
    states, masters = zip(*held)
    # at stage 0 every rank holds all of the state, and otherwise all ranks of a replicate group hold the same
    return (sum(states) // engine.comm.num_replicas if int(engine.stage) else max(states)) + sum(masters)


def save_with_room(
    comm: Comm,
    save: Callable[[str], None],
    folder: str,
    inside: str = "",
    *,
    what: str,
    fallback: str | None,
    signals: StopOnSignal,
) -> str:
    """Saves something that only memory holds. Where the disk is full it saves elsewhere, or waits for room. All ranks
    call it.

    Args:
        save (`Callable`): saves into a folder; it raises on all ranks when it fails on one.
        inside (`str`): the name of a folder in it, to save there.
        fallback (`str`, *optional*): a folder on another disk, which gets one after which `folder` is named. Where it
            cannot be used for another reason than room, this is said, and `folder` is waited for.
        signals (`StopOnSignal`): one of its signals gives up.

    Raises:
        `Stopped`: a signal came while there was no room.
        `CheckpointError`, or whatever `save` raises about `folder` for another reason than a full disk.
    """
    wanted = os.path.join(folder, inside) if inside else folder
    if lack_of_room(comm, partial(save, wanted)) is None:
        return wanted
    elsewhere, said = _Elsewhere(comm, fallback, folder, inside), -math.inf
    with signals.received():
        while True:
            place = elsewhere.saved(save)
            if place is not None:
                return place
            lack = lack_of_room(comm, partial(save, wanted))
            if lack is None:
                return wanted
            if comm.rank == 0 and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                _say_lack(wanted, what, lack)
            time.sleep(LOOK_SECONDS)
            number = signals.agreed()
            if number:
                logger.error("%s: %s is not saved to %s", signal.Signals(number).name, what, wanted)
                raise Stopped(number, wanted)


def _say_lack(folder: str, what: str, lack: int) -> None:
    missing = f", {size_text(lack)} are missing" if lack else ""
    logger.error(
        "%s: no room for %s%s; free space there: it is looked for every %.0f s, and SIGTERM gives it up",
        *(folder, what, missing, LOOK_SECONDS),
    )


class _Elsewhere:
    """Another folder to save into, until it turns out that it cannot be used."""

    def __init__(self, comm: Comm, fallback: str | None, folder: str, inside: str):
        self._comm = comm
        self._fallback = fallback  # None once it cannot be used
        self._wanted = (folder, inside)
        self._folder: str | None = None  # until it is chosen

    def saved(self, save: Callable[[str], None]) -> str | None:
        """Tries to save there, and returns the folder, or `None` when it was not saved. All ranks call it."""
        if not self._fallback:
            return None
        try:
            if self._folder is None:
                choose = on_first(self._comm, partial(fallback_of, self._fallback, *self._wanted))
                self._folder = collect_from_all_ranks(self._comm, "choosing a folder in zero_save_fallback", choose)[0]
            folder = str(self._folder)
            return folder if lack_of_room(self._comm, partial(save, folder)) is None else None
        except CommError:
            raise
        except Exception as error:  # on all ranks: the first folder is still waited for
            self._fallback = None
            if self._comm.rank == 0:
                logger.error("zero_save_fallback is not used any more: %s", error)
            return None


def lack_of_room(comm: Comm, save: Callable[[], object]) -> int | None:
    """Tries to save, by an act that raises on all ranks when it fails on one. Returns how many bytes are missing if
    the disk had no room, 0 where that is not known, and `None` when it is saved; the same on all ranks, which all call
    it."""
    failure: Exception | None = None
    try:
        save()
    except CommError:  # there is nobody to tell it; so is an interrupt of one rank, and all have been told
        raise
    except Exception as error:  # a rank that was only told of it does not know the reason
        failure = error
    lacks = [lack for lack in comm.all_gather_object(_lack_in(failure)) if lack is not None]
    if failure is not None and not lacks:
        raise failure
    return max(lacks) if lacks else None


def fallback_of(fallback: str, folder: str, inside: str = "") -> str:
    """Returns an empty folder inside the fallback folder. It may hold others where a folder `inside` it is to hold
    nothing."""
    name = Path(os.path.abspath(folder)).name
    named = (Path(fallback) / (name if number == 1 else f"{name}-{number}") for number in range(1, 10**6))
    return str(next(path / inside for path in named if _is_usable(path) and _is_empty(path / inside)))


def _num_checkpoints(args, state) -> int:
    """Returns how many checkpoints there will be at one time, as far as that is known."""
    done, num_steps = state.global_step, state.max_steps
    if num_steps <= done or args.save_strategy == SaveStrategy.NO:
        return 0
    count = 1
    if args.save_strategy == SaveStrategy.STEPS:
        every = max(1, int(state.save_steps))  # a share of all steps is a number here
        count = math.ceil(num_steps / every) - done // every
    elif args.save_strategy == SaveStrategy.EPOCH and state.num_train_epochs < sys.maxsize:  # else: a stream
        count = max(1, math.ceil(state.num_train_epochs - (state.epoch or 0)))
    limit = args.save_total_limit or 0
    return min(count, limit + 1) if limit > 0 else count


def _free_nbytes(folder: Path) -> int:
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _lack_in(failure: BaseException | None) -> int | None:
    for cause in causes(failure):
        if isinstance(cause, NoRoomError):
            return cause.missing_nbytes
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return 0
    # libraries in other languages raise texts
    return 0 if failure and any(os.strerror(number) in str(failure) for number in NO_ROOM) else None


def _is_usable(path: Path) -> bool:
    return path.is_dir() or not os.path.lexists(path)


def _is_empty(path: Path) -> bool:
    return _is_usable(path) and not (path.is_dir() and any(path.iterdir()))


# Which checkpoints go when there are more than `--save_total_limit`


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, the newest first, by their steps: dates change when folders are copied."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=age_of, reverse=True)


def age_of(checkpoint: Path) -> tuple[int, str]:
    """Returns a key that sorts checkpoints, the oldest first: the optimizer steps that a name tells, then the name.
    All ranks are to have `checkpoint-5` and `checkpoint-05` in the same order."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None, f"{checkpoint} is no checkpoint's name"
    return int(found[1]), checkpoint.name


def rotate(run_dir: str, limit: int | None, best: str | None, newest: str) -> None:
    """Deletes the checkpoints with the fewest steps beyond `limit`. It is called when `newest` is complete.

    Whatever the limit, these stay: `newest`, `best`, and the newest that is known to be finite, so that a run whose
    loss has become NaN does not push out the last checkpoint that is of use. `newest` has just been saved; a run that
    went on from an older one may have others with more steps. At the end of a run it is the best, where Trainer keeps
    no other with a limit of one. A limit of `None` or 0 keeps all.
    """
    # a link, such as to another disk, belongs to the user
    found = [path for path in checkpoints_in(Path(run_dir)) if not path.is_symlink()]
    if not 0 < (limit or 0) < len(found):
        return
    kept = {Path(newest).name, *([Path(best).name] if best else [])}
    kept |= {path.name for path in [path for path in (Path(newest), *found) if is_known_finite(path)][:1]}
    removable = [path for path in reversed(found) if path.name not in kept]
    for path in removable[: len(found) - (limit or 0)]:
        remove_folder(path)


def is_known_finite(checkpoint: Path) -> bool:
    """Returns whether loss and gradient norm of a checkpoint's last step were finite, by its manifest."""
    manifest = manifest_of(checkpoint)
    return manifest is not None and None not in (manifest.loss, manifest.grad_norm)


def manifest_of(folder: Path) -> Manifest | None:
    """Returns the manifest of a checkpoint; `None` where there is none that is whole."""
    try:
        return Manifest.read(folder)
    except CheckpointError:
        return None
