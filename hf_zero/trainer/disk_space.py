"""Disk space: it is checked before the first step. Checkpoints beyond `--save_total_limit` are deleted."""

import logging
import math
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import SavedRun, check_checkpoint, plan_weights
from hf_zero.checkpoint.adapters import is_adapter_model
from hf_zero.checkpoint.folders import make_folder, remove_folder
from hf_zero.checkpoint.staging import refuse_unshared
from hf_zero.checkpoint.state import masters_nbytes
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, size_text


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")


def check_room(trainer: "ZeroTrainerMixin") -> None:
    """Checks, before the first step, that all ranks see the folder of a run that will save, and that the files fit its
    disk. All ranks call it. Raises [`CheckpointError`] where there is no room for one checkpoint, and the model at the
    end where that will be saved."""
    args = trainer.args
    num_saved = _num_checkpoints(args, trainer.state)
    if not num_saved and not trainer.leaves_model:
        return
    engine, folder = trainer._engine, Path(args.output_dir)
    run_on_all_ranks(engine.comm, f"looking at {folder}", on_first(engine.comm, lambda: make_folder(folder)))
    refuse_unshared(engine.comm, folder)
    # an adapter is small, and what it takes is known when PEFT writes it
    model = 0 if is_adapter_model(trainer.model) else plan_weights(engine).files.nbytes
    checkpoint = model * (1 + trainer.saves_itself())
    checkpoint += 0 if args.save_only_model else state_nbytes(trainer)
    final = model * trainer.leaves_model
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


def state_nbytes(trainer: "ZeroTrainerMixin") -> int:
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
    folder = folder.resolve()  # of a symbolic link, the disk that it leads to
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


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
    """Returns whether a checkpoint is complete, and loss and gradient norm of its last step were finite."""
    run = complete_run(checkpoint)
    return run is not None and None not in (run.loss, run.grad_norm)


def complete_run(folder: Path) -> SavedRun | None:
    """Returns the record of the run that saved a checkpoint; `None` where it has no state, or is not complete."""
    try:
        manifest = check_checkpoint(folder)
    except CheckpointError:
        return None
    return None if manifest is None else manifest.run
