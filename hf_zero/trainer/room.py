"""Room on the disk: looked at before the first step, and waited for when a trained model cannot be saved for lack of
it."""

import errno
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import plan_weights
from hf_zero.checkpoint.state import masters_nbytes
from hf_zero.comm import Comm
from hf_zero.comm.agreement import gathered
from hf_zero.errors import CheckpointError, NoRoomError
from hf_zero.trainer.adapters import is_adapter_model
from hf_zero.trainer.signals import StopOnSignal, Stopped


logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SAY_SECONDS = 60.0
MIB = 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def check_room(trainer) -> None:
    """Looks, before the first step, whether what the run will save fits its disk. All ranks call it.

    Args:
        trainer (`ZeroTrainerMixin`): its model and optimizer prepared.

    Raises:
        `CheckpointError`: there is no room for one checkpoint, and the model at the end where that will be saved.
    """
    args = trainer.args
    num_saved = _num_checkpoints(args, trainer.state.max_steps - trainer.state.global_step)
    if not num_saved and not trainer.leaves_model:
        return
    engine = trainer.zero_engine
    # an adapter is small, and what it takes is known when PEFT writes it
    model = 0 if is_adapter_model(trainer.model) else plan_weights(engine).part.files.nbytes
    checkpoint = model if args.save_only_model else model + state_nbytes(trainer)
    final = model * trainer.leaves_model
    folder = Path(args.output_dir)
    free = min(gathered(engine.comm, f"looking at {folder}", lambda: _free_nbytes(folder)))
    needed = (checkpoint if num_saved else 0) + final
    if free < needed:
        raise CheckpointError(
            f"{folder}: the run will save {needed / MIB:.0f} MiB at least, {free / MIB:.0f} MiB are free; free space "
            "there or give another output_dir"
        )
    whole = checkpoint * num_saved + final
    if free < whole and args.process_index == 0:
        logger.warning(
            "%s: %d checkpoints of %.0f MiB will not fit with the %.0f MiB that are free; save_total_limit deletes "
            "old ones, save_only_model leaves their state out",
            folder,
            num_saved,
            checkpoint / MIB,
            free / MIB,
        )


def state_nbytes(trainer) -> int:
    """Bytes in a checkpoint of what the optimizer will hold from the first step on, and of masters. All ranks call it;
    the state of optimizers that are not elementwise is not known before the first step."""
    engine, optimizer = trainer.zero_engine, trainer._zero_optimizer
    own = sum(numel * dtype.itemsize for dtype, numel, _ in optimizer.expected_state())
    held = gathered(engine.comm, "looking at the optimizer's state", lambda: (own, masters_nbytes(engine)))
    states, masters = zip(*held)
    # at stage 0 every rank holds all of the state
    return (sum(states) if int(engine.stage) else max(states)) + sum(masters)


def save_with_room(
    comm: Comm, folder: str, fallback: str | None, save: Callable[[str], None], signals: StopOnSignal
) -> str:
    """Saves what only memory holds. Where the disk is full, it saves into `fallback`, or looks again until there is
    room. All ranks call it.

    Args:
        comm (`Comm`): the ranks.
        folder (`str`): where to save.
        fallback (`str`, *optional*): a folder for such cases.
        save (`Callable`): saves into a folder; it raises on all ranks when it fails on one.
        signals (`StopOnSignal`): one of its signals gives up.

    Returns:
        `str`: where it was saved.

    Raises:
        `Stopped`: a signal came while there was no room.
        `CheckpointError`, or whatever `save` raises for another reason than a full disk.
    """
    lack = _lack(comm, lambda: save(folder))
    if lack is None:
        return folder
    elsewhere = comm.broadcast_object(_fallback_of(fallback, folder)) if fallback else None
    before, said = signals.install(), -math.inf
    try:
        while True:
            for place in (elsewhere, folder):
                if place is not None:
                    lack = _lack(comm, lambda: save(place))  # noqa: B023 - called at once
                    if lack is None:
                        return place
            if comm.rank == 0 and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                logger.warning(
                    "%s: no room for the model%s; free space there: it is looked for every %.0f s, and SIGTERM gives "
                    "the model up",
                    folder,
                    f", {lack / MIB:.0f} MiB are missing" if lack else "",
                    LOOK_SECONDS,
                )
            time.sleep(LOOK_SECONDS)
            number = signals.agreed()
            if number:
                logger.error("%s: the model is not saved to %s", signal.Signals(number).name, folder)
                raise Stopped(number, folder)
    finally:
        signals.remove(before)


def _num_checkpoints(args, num_steps: int) -> int:
    """How many checkpoints there will be at one time, as far as that is known."""
    if num_steps <= 0 or args.save_strategy == SaveStrategy.NO:
        return 0
    count = 1
    if args.save_strategy == SaveStrategy.STEPS:
        count = max(1, math.ceil(num_steps / max(1, int(args.save_steps))))
    elif args.save_strategy == SaveStrategy.EPOCH:
        count = max(1, math.ceil(args.num_train_epochs))
    limit = args.save_total_limit or 0
    return min(count, limit + 1) if limit > 0 else count


def _free_nbytes(folder: Path) -> int:
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _lack(comm: Comm, save: Callable[[], None]) -> int | None:
    """Tries; how many bytes are missing, 0 where that is not known, `None` when it is saved."""
    failure: BaseException | None = None
    try:
        save()
    except BaseException as error:  # every rank tells how it went, or the others would wait for it
        failure = error
    lacks = [lack for lack in comm.all_gather_object(_lack_of(failure)) if lack is not None]
    if failure is not None and not lacks:
        raise failure
    return max(lacks) if lacks else None


def _lack_of(failure: BaseException | None) -> int | None:
    if not isinstance(failure, Exception):
        return None
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, NoRoomError):
            return cause.missing_nbytes
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return 0
        cause = cause.__cause__ or cause.__context__
    # libraries in other languages raise texts
    return 0 if any(os.strerror(number) in str(failure) for number in NO_ROOM) else None


def _fallback_of(fallback: str, folder: str) -> str:
    """A folder that holds nothing yet, in the one for such cases, by the name of the one that has no room."""
    name = Path(os.path.abspath(folder)).name
    candidates = (Path(fallback) / (name if number == 1 else f"{name}-{number}") for number in range(1, 10**6))
    return str(next(path for path in candidates if not path.exists() or not any(path.iterdir())))
