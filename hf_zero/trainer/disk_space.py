"""Disk space: a check before the first step, and deletion of checkpoints beyond `--save_total_limit`."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import check_checkpoint, plan_weights
from hf_zero.checkpoint.adapters import is_adapter_model
from hf_zero.checkpoint.folders import make_folder, remove_folder
from hf_zero.checkpoint.staging import refuse_unshared
from hf_zero.checkpoint.state import masters_nbytes
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, size_text


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

_NAME = re.compile(r"checkpoint-(\d+)")


def check_room(trainer: "ZeroTrainerMixin") -> None:
    """Checks before the first step that all ranks share the output folder and that its disk has enough free space. All
    ranks must call it. Raises [`CheckpointError`] if one checkpoint plus the final model, if saved, do not fit."""
    args = trainer.args
    saves = args.save_strategy != SaveStrategy.NO
    if not saves and not trainer.leaves_model:
        return
    engine, folder = trainer._engine, Path(args.output_dir)
    run_on_all_ranks(engine.comm, f"looking at {folder}", on_first(engine.comm, lambda: make_folder(folder)))
    refuse_unshared(engine.comm, folder)
    # an adapter is small, and its size is unknown until PEFT writes it
    model = 0 if is_adapter_model(trainer.model) else plan_weights(engine).files.nbytes
    checkpoint = model * (1 + trainer.saves_itself()) + (0 if args.save_only_model else state_nbytes(trainer))
    needed = checkpoint * saves + model * trainer.leaves_model
    free = min(collect_from_all_ranks(engine.comm, f"looking at {folder}", lambda: shutil.disk_usage(folder).free))
    if free < needed:
        raise CheckpointError(
            f"{folder}: the run will save at least {size_text(needed)}, but {size_text(free)} are free; free space "
            "there or set another output_dir"
        )


def state_nbytes(trainer: "ZeroTrainerMixin") -> int:
    """Returns the bytes of master weights and optimizer state in a checkpoint. All ranks must call it. Before the
    first step, it does not count the state of optimizers that are not elementwise."""
    engine, optimizer = trainer._engine, trainer._prepared_optimizer
    own = sum(numel * dtype.itemsize for dtype, numel, _ in optimizer.expected_state())
    held = collect_from_all_ranks(
        engine.comm, "looking at the optimizer's state", lambda: (own, masters_nbytes(engine))
    )
    states, masters = zip(*held)
    # at stage 0 every rank holds the full state; otherwise, the ranks of a replicate group hold the same shard
    return (sum(states) // engine.comm.num_replicas if int(engine.stage) else max(states)) + sum(masters)


# Deletion of checkpoints beyond `--save_total_limit`


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, newest first. Sorts by step, since copying folders changes their dates."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=age_of, reverse=True)


def age_of(checkpoint: Path) -> tuple[int, str]:
    """Returns a key that sorts checkpoints, oldest first: the optimizer steps in the name, then the name, so that all
    ranks sort `checkpoint-5` and `checkpoint-05` in the same order."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None, f"{checkpoint} is not the name of a checkpoint"
    return int(found[1]), checkpoint.name


def rotate(run_dir: str, limit: int | None, best: str | None, newest: str) -> None:
    """Deletes the oldest checkpoints beyond `limit`. Call it when `newest` is complete.

    Always keeps `newest`, `best`, and the newest checkpoint that is known to be finite, so that a run whose loss has
    become NaN does not delete the last usable checkpoint.

    Args:
        run_dir (`str`): The folder of the checkpoints.
        limit (`int`, *optional*): Number of checkpoints to keep. `None` or 0 keeps all.
        best (`str`, *optional*): The checkpoint with the best metric.
        newest (`str`): The checkpoint that was just saved. A run that was resumed from an older checkpoint may have
            others with more steps. At the end of a run with a limit of 1, this is the best checkpoint.
    """
    # symbolic links, for example to another disk, belong to the user
    found = [path for path in checkpoints_in(Path(run_dir)) if not path.is_symlink()]
    if not 0 < (limit or 0) < len(found):
        return
    kept = {Path(newest).name, *([Path(best).name] if best else [])}
    kept |= {path.name for path in [path for path in (Path(newest), *found) if is_known_finite(path)][:1]}
    removable = [path for path in reversed(found) if path.name not in kept]
    for path in removable[: len(found) - (limit or 0)]:
        remove_folder(path)


def is_known_finite(checkpoint: Path) -> bool:
    """Returns whether a checkpoint is complete and the loss and gradient norm of its last step are finite."""
    try:
        manifest = check_checkpoint(checkpoint)
    except CheckpointError:
        return False
    run = None if manifest is None else manifest.run
    return run is not None and None not in (run.loss, run.grad_norm)
