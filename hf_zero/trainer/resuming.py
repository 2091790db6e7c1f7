"""Which checkpoint a run goes on from: the newest that is complete on every rank."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import gather_object
from transformers import TrainerCallback

from hf_zero.checkpoint import Manifest, check_checkpoint
from hf_zero.checkpoint.folders import restore_replaced
from hf_zero.checkpoint.foreign import detect
from hf_zero.checkpoint.manifest import manifest_path
from hf_zero.errors import CheckpointError
from hf_zero.trainer.archives import check_archives
from hf_zero.trainer.position import Position
from hf_zero.trainer.rotation import checkpoints_in, step_of
from hf_zero.trainer.saving import mean_over_ranks


logger = logging.getLogger(__name__)


def newest_complete(output_dir: str, *, is_first: bool) -> str | None:
    """The newest checkpoint that all ranks find complete. What is skipped is said, and why. All ranks call it.

    Args:
        output_dir (`str`): where the checkpoints lie.
        is_first (`bool`): whether this rank speaks for all.

    Returns:
        `str` or `None`: its folder; `None` where there is none.
    """
    return newest_of(checkpoint_faults(output_dir), is_first=is_first)


def newest_of(faults: dict[str, str | None], *, is_first: bool) -> str | None:
    """As `newest_complete`, of what `checkpoint_faults` has found."""
    num_skipped = 0
    for path, fault in faults.items():
        if fault is None:
            if is_first and num_skipped:
                logger.warning("going on from %s", path)
            return path
        num_skipped += 1
        if is_first:
            logger.warning("%s is skipped: %s", path, fault)
    return None


def checkpoint_faults(output_dir: str) -> dict[str, str | None]:
    """What keeps each checkpoint from being resumed from. All ranks call it, and get the same.

    Args:
        output_dir (`str`): where the checkpoints lie.

    Returns:
        `dict[str, str | None]`: by folder, the newest first; `None` where all ranks find it complete.
    """
    folder = Path(output_dir)
    restore_replaced(folder)
    gather_object([None])  # nobody looks before that is done
    seen = gather_object([{path.name: _fault(path) for path in checkpoints_in(folder)}])
    faults = {}
    names = {name for found in seen for name in found}
    for name in sorted(names, key=lambda name: step_of(folder / name), reverse=True):
        reasons = [found.get(name, "is not seen by every rank") for found in seen]
        faults[str(folder / name)] = next((reason for reason in reasons if reason is not None), None)
    return faults


@dataclass(frozen=True)
class Resumed:
    """What a run that is resumed knows of the run before.

    Args:
        position (`Position`): where it was in its data.
        loss (`float`, *optional*): of its last step.
        accumulation (`int`, *optional*): micro-batches in a step; some models' losses grow with it.
    """

    position: Position = Position(0, 0, 0)
    loss: float | None = None
    accumulation: int | None = None


def resumed_from(folder: str | None) -> Resumed:
    """Reads the record of a checkpoint; weights without a state have none.

    Raises:
        `CheckpointError`: it cannot be read, or the schedule or random states beside it.
    """
    if folder is not None and Path(folder).is_dir():
        check_archives(folder)
    if folder is None or not manifest_path(folder).is_file():
        return Resumed()
    manifest = Manifest.read(folder)
    position = manifest.extra.get("position")
    return Resumed(
        Position(**position) if position else Position(0, 0, 0), manifest.loss, manifest.extra.get("accumulation")
    )


class CompareLoss(TrainerCallback):
    """Says so when the first loss after resuming is far from the last one before: then the data, the model or the
    settings are not what they were.

    Args:
        trainer (`ZeroTrainerMixin`): which is resumed.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._before: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        before = self._trainer.resumed
        self._before = before.loss if before.accumulation == args.gradient_accumulation_steps else None

    def on_step_end(self, args, state, control, **kwargs):
        before, self._before = self._before, None
        if before is None:
            return
        after = mean_over_ranks(self._trainer.zero_engine, self._trainer.accelerator.last_step.loss)
        if state.is_world_process_zero and (after is None or after > 1.5 * before + 0.1):
            logger.warning(
                "step %d: the first loss after resuming is %s, the last before was %s; check that data, model and "
                "settings are those of the checkpoint",
                state.global_step,
                after,
                before,
            )


def check_state(folder: str | Path) -> None:
    """Checks that a folder can be resumed from: weights and state complete, the trainer's own state readable.

    Raises:
        `CheckpointError`: saying what is missing or damaged.
    """
    if detect(folder) is None:
        check_checkpoint(folder)
    check_archives(folder)
    path = Path(folder) / "trainer_state.json"
    try:
        json.loads(path.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}); resume from another checkpoint"
        ) from error


def _fault(folder: Path) -> str | None:
    try:
        check_state(folder)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # JSON of other types, names that are no text: no rank may leave alone
        return f"cannot be understood ({type(error).__name__}: {error})"
    return None
