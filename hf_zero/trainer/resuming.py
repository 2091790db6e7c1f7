"""Which checkpoint a run goes on from: the newest that is as it was saved, on every rank."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import Manifest, check_checkpoint
from hf_zero.checkpoint.folders import restore_replaced
from hf_zero.checkpoint.foreign import detect
from hf_zero.checkpoint.manifest import manifest_path, recorded
from hf_zero.checkpoint.pretrained import CONFIG_NAMES
from hf_zero.checkpoint.table import TABLE_NAME
from hf_zero.checkpoint.verify import check_tensors, tensors_of
from hf_zero.errors import CheckpointError, MissingCheckpointError
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.belonging import check_belonging, position_of
from hf_zero.trainer.position import Position
from hf_zero.trainer.rotation import age_of, checkpoints_in


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Which checkpoint to go on from.

    Args:
        folder (`str`, *optional*): the newest that is whole; `None` where none is.
        faults (`dict[str, str]`): what is wrong with those that are newer, by folder, the newest first.
    """

    folder: str | None
    faults: dict[str, str]


def newest_whole(output_dir: str, *, is_first: bool, strict: bool = False, needs_config: bool = False) -> Choice:
    """The newest checkpoint that is as it was saved, on every rank. All ranks call it, and get the same.

    What is small is read by every rank, the tensors are divided over the ranks that see the same files. What is
    skipped is said, and why.

    Args:
        output_dir (`str`): where the checkpoints lie.
        is_first (`bool`): whether this rank speaks for all.
        strict (`bool`): takes the newest or none.
        needs_config (`bool`): whether checkpoints of this run have a config.

    Raises:
        `CheckpointError`: the newest is damaged, and `strict` was asked for.
    """
    folder = Path(output_dir)
    restore_replaced(folder)
    gather_object([None])  # nobody looks before that is done
    names = {name for found in gather_object([[path.name for path in checkpoints_in(folder)]]) for name in found}
    faults: dict[str, str] = {}
    for path in sorted((folder / name for name in names), key=age_of, reverse=True):
        fault = fault_of(path, needs_config=needs_config, reads_tensors=True)
        if fault is None:
            if is_first and faults:
                logger.warning("going on from %s", path)
            if is_first:
                _warn_of_changed(path)
            return Choice(str(path), faults)
        if strict:
            raise CheckpointError(
                f"{fault} (--zero_resume_strict: {path} is the newest checkpoint, and no older one is taken)"
            )
        faults[str(path)] = str(fault)
        if is_first:
            logger.warning("%s is skipped: %s", path, fault)
    return Choice(None, faults)


def fault_of(folder: Path, *, needs_config: bool, reads_tensors: bool) -> CheckpointError | None:
    """What keeps a checkpoint from being resumed from. All ranks call it, and get the same.

    Args:
        folder (`Path`): the checkpoint.
        needs_config (`bool`): see `check_resumable`.
        reads_tensors (`bool`): reads the tensors, too. Otherwise they are compared when they are loaded.

    Returns:
        `CheckpointError` or `None`: `None` where all ranks find it whole.
    """
    sees = gather_object([folder.is_dir()])
    if not all(sees):
        found = "is not seen by every rank" if any(sees) else "does not exist"
        return MissingCheckpointError(f"{folder}: {found}; resume from another checkpoint")
    own = _fault(lambda: check_resumable(folder, needs_config=needs_config))
    seen = gather_object([(own, _identity(folder))])
    fault = next((fault for fault, _ in seen if fault is not None), None)
    if fault is not None or not reads_tensors:
        return fault
    rank = PartialState().process_index
    sharing = [other for other, (_, identity) in enumerate(seen) if identity == seen[rank][1]]
    own = _fault(lambda: _check_own_tensors(folder, sharing.index(rank), len(sharing)))
    return next((fault for fault in gather_object([own]) if fault is not None), None)


def _check_own_tensors(folder: Path, index: int, count: int) -> None:
    table = recorded(folder)
    if table is not None:
        check_tensors(folder, tensors_of(table)[index::count], table)


def _identity(folder: Path) -> tuple[int, ...] | None:
    """Ranks for which it is equal see the same files: copies on several disks differ in time, by nanoseconds."""
    for path in (folder / TABLE_NAME, manifest_path(folder), folder / TRAINER_STATE_NAME):
        if path.is_file():
            found = path.stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def chosen(args: ZeroArgumentsMixin, *, needs_config: bool) -> str:
    """The checkpoint that `resume_from_checkpoint=True` means. All ranks call it, and get the same.

    Raises:
        `CheckpointError`: there is none, or the newest is damaged and `zero_resume_strict` is set.
    """
    choice = newest_whole(
        args.output_dir,
        is_first=args.process_index == 0,
        strict=args.zero_resume_strict,
        needs_config=needs_config,
    )
    if choice.folder is None:
        raise MissingCheckpointError(
            f"{args.output_dir}: holds no complete checkpoint to resume from; train from the start"
        )
    return choice.folder


def refuse_damaged(folder: Path, *, needs_config: bool) -> None:
    """Refuses a checkpoint that was named, before anything is loaded. All ranks call it, and raise the same.

    Raises:
        `CheckpointError`: saying what is missing or damaged.
    """
    fault = fault_of(folder, needs_config=needs_config, reads_tensors=False)
    if fault is not None:
        raise fault
    if PartialState().is_main_process:
        _warn_of_changed(folder)


def _warn_of_changed(folder: Path) -> None:
    """Names the files that are not as they were saved, and that a run does not read."""
    table = recorded(folder)
    if table is not None and (changed := table.changed_files(folder)):
        logger.warning("%s: changed since it was saved, and is not read here: %s", folder, ", ".join(changed))


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


def resumed_from(folder: str | os.PathLike | None) -> Resumed:
    """Reads the record of a checkpoint; weights without a state have none.

    Raises:
        `CheckpointError`: it cannot be read.
    """
    if folder is None or not manifest_path(folder).is_file():
        return Resumed()
    manifest = Manifest.read(folder)
    position = position_of(folder, manifest) or Position(0, 0, 0)
    return Resumed(position, manifest.loss, manifest.extra.get("accumulation"))


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
        after = self._trainer.accelerator.last_step.mean_loss(self._trainer.zero_engine)
        if state.is_world_process_zero and (after is None or after > 1.5 * before + 0.1):
            logger.warning(
                "step %d: the first loss after resuming is %s, the last before was %s; check that data, model and "
                "settings are those of the checkpoint",
                state.global_step,
                after,
                before,
            )


def check_resumable(folder: str | Path, *, needs_config: bool = False) -> None:
    """Checks that a folder can be resumed from: what that reads, but for the values of tensors, is as it was saved.

    Args:
        folder (`str` or `Path`): the checkpoint.
        needs_config (`bool`): whether checkpoints of this run have a config. One with checksums needs not be told.

    Raises:
        `CheckpointError`: saying what is missing or damaged.
    """
    folder = Path(folder)
    if detect(folder) is None:
        check_checkpoint(folder)
        if needs_config and not any((folder / name).is_file() for name in CONFIG_NAMES):
            raise CheckpointError(f"{folder / CONFIG_NAMES[0]}: is missing; resume from another checkpoint")
    check_belonging(folder)


def _fault(check: Callable[[], None]) -> CheckpointError | None:
    try:
        check()
    except CheckpointError as error:
        return error
    except Exception as error:  # types that nobody expects, a disk that fails: no rank may leave alone
        return CheckpointError(f"cannot be understood ({type(error).__name__}: {error})")
    return None
