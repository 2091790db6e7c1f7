"""Selects the checkpoint to resume from: the newest one that is intact on every rank.

The manifest has checksums of weights and state. Files that Trainer writes itself must exist and be of the same step.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_zero.checkpoint import Manifest, SavedRun, check_checkpoint
from hf_zero.checkpoint.convert import OtherProgramError, program_of
from hf_zero.checkpoint.folders import read_json, recover
from hf_zero.checkpoint.manifest import MANIFEST_NAME, TAKE_ANOTHER, run_of
from hf_zero.checkpoint.plain import is_plain
from hf_zero.checkpoint.trusted import check_archive, load_safely
from hf_zero.errors import CheckpointError, MissingCheckpointError
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.disk_space import age_of, checkpoints_in
from hf_zero.trainer.place import Position


logger = logging.getLogger(__name__)

_RNG_STATES = re.compile(r"rng_state(_\d+)?\.pth")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from."""

    folder: str | None  # the newest intact checkpoint
    faults: dict[str, str]  # errors of newer checkpoints by folder, newest first


def newest_whole(output_dir: str, *, is_first: bool, strict: bool = False) -> Choice:
    """Returns the newest checkpoint that is intact on every rank. All ranks must call it, and get the same result.

    Every rank reads the small files, and the ranks share the verification of tensors. The rank with `is_first` logs
    which checkpoints are skipped and why.

    Raises:
        `CheckpointError`: If `strict` is set and the newest checkpoint is damaged, or if it is another program's.
    """
    folder = Path(output_dir)
    recover(folder)
    gather_object([None])  # wait until `recover` is done on all ranks
    names = {name for found in gather_object([[path.name for path in checkpoints_in(folder)]]) for name in found}
    faults: dict[str, str] = {}
    for path in sorted((folder / name for name in names), key=age_of, reverse=True):
        fault = fault_of(path, reads_tensors=True)
        if fault is None:
            if is_first and faults:
                logger.warning("resuming from %s", path)
            return Choice(str(path), faults)
        if isinstance(fault, OtherProgramError):  # the user wants to continue it, not an older or a new run
            raise fault
        if strict:
            raise CheckpointError(
                f"{fault} (--zero_resume_strict: {path} is the newest checkpoint, and older ones are not used)"
            )
        faults[str(path)] = str(fault)
        if is_first:
            logger.warning("%s is skipped: %s", path, fault)
    return Choice(None, faults)


def fault_of(folder: Path, *, reads_tensors: bool) -> CheckpointError | None:
    """Returns the reason why a run cannot resume from a checkpoint, or `None`. All ranks must call it, and get the
    same result. Without `reads_tensors`, tensors are verified when they are loaded."""
    sees = gather_object([folder.is_dir()])
    if not all(sees):
        found = "is not visible on every rank" if any(sees) else "does not exist"
        return MissingCheckpointError(f"{folder}: {found}; resume from another checkpoint")
    checks = [lambda: check_resumable(folder)] + ([lambda: _check_own_tensors(folder)] if reads_tensors else [])
    for check in checks:
        fault = next((fault for fault in gather_object([_fault(check)]) if fault is not None), None)
        if fault is not None:
            return fault
    return None


def _check_own_tensors(folder: Path) -> None:
    """Compares this rank's share of the tensors with the manifest."""
    manifest, state = Manifest.read(folder), PartialState()
    if manifest is not None:
        manifest.check_tensors(folder, manifest.tensors[state.process_index :: state.num_processes])


def chosen(args: ZeroArgumentsMixin) -> str:
    """Returns the checkpoint for `resume_from_checkpoint=True`. All ranks must call it, and get the same result.
    Raises [`CheckpointError`] if there is none, or if the newest is damaged and `zero_resume_strict` is set."""
    choice = newest_whole(args.output_dir, is_first=args.process_index == 0, strict=args.zero_resume_strict)
    if choice.folder is None:
        raise MissingCheckpointError(f"{args.output_dir}: has no complete checkpoint to resume from; start a new run")
    return choice.folder


def refuse_damaged(folder: Path) -> None:
    """Raises for a damaged checkpoint before anything is loaded. All ranks must call it, and raise the same."""
    fault = fault_of(folder, reads_tensors=False)
    if fault is not None:
        raise fault


def check_resumable(folder: str | Path) -> None:
    """Checks that a run can resume from a folder and that the files to read are unchanged, except the values of
    tensors, which are verified later."""
    folder = Path(folder)
    if (program := program_of(folder)) is not None:
        raise OtherProgramError(
            f"{folder}: is a checkpoint of {program.name}; convert it with hf-zero convert {folder} NEW, and resume "
            "from NEW"
        )
    if not is_plain(folder):
        check_checkpoint(folder)
    check_belonging(folder)


def _fault(check: Callable[[], None]) -> CheckpointError | None:
    try:
        check()
    except CheckpointError as error:
        return error
    except Exception as error:  # malformed content or a disk error: no rank may raise alone
        return CheckpointError(f"cannot be read ({type(error).__name__}: {error})")
    return None


def check_belonging(folder: Path) -> None:
    """Checks that the trainer state, the manifest, the position in the data and the schedule are of the same step, and
    that the states of the random generators exist. Also accepts checkpoints of a plain `Trainer`."""
    step = read_step(folder)
    run = run_of(folder)
    if run is None:
        for path in sorted(folder.iterdir()):
            if path.name == SCHEDULER_NAME or _RNG_STATES.fullmatch(path.name):
                check_archive(path)
        return
    steps: dict[str | Path, int | None] = {folder / MANIFEST_NAME: run.step}
    position = position_of(folder, run)
    if position is not None:
        steps[f"{folder / MANIFEST_NAME} (position in the data)"] = position.step
    for where, found in steps.items():
        if found not in (None, step):
            raise CheckpointError(
                f"{where}: is of step {found}, but {TRAINER_STATE_NAME} is of step {step}; they belong to different "
                f"checkpoints: {TAKE_ANOTHER}"
            )
    if run.step is not None:  # saved by a trainer
        _check_schedule(folder, run)
        _check_generators(folder, run)


def read_step(folder: Path) -> int:
    """Returns the number of optimizer steps of a run from the trainer state."""
    path = folder / TRAINER_STATE_NAME
    try:
        step = read_json(path).get("global_step")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; {TAKE_ANOTHER}") from error
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: global_step is {step!r}, expected a number of steps; {TAKE_ANOTHER}")
    return step


def position_of(folder: str | os.PathLike, run: SavedRun) -> Position | None:
    """Returns the saved position of a run in its data."""
    saved = run.extra.get("position")
    if saved is None:
        return None
    names = ("epoch", "sample", "step")
    if not isinstance(saved, dict) or set(saved) != set(names) or not all(_is_count(saved[name]) for name in names):
        raise CheckpointError(f"{Path(folder) / MANIFEST_NAME}: {saved!r} is no position in the data; {TAKE_ANOTHER}")
    return Position(**saved)


def schedule_position(scheduler: Any) -> int | None:
    """Returns the number of steps of a schedule from its state, or `None` if unknown."""
    return None if scheduler is None else _position_in(scheduler.state_dict())


def _position_in(saved: Any) -> int | None:
    position = saved.get("last_epoch") if isinstance(saved, dict) else None
    return position if _is_count(position) else None


def _check_schedule(folder: Path, run: SavedRun) -> None:
    path, expected = folder / SCHEDULER_NAME, run.extra.get("schedule")
    if not path.is_file():
        if expected is None:
            return  # the run had none
        raise CheckpointError(f"{path}: is missing; the schedule would restart from step 0; {TAKE_ANOTHER}")
    saved = load_safely(path)
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: has no schedule; {TAKE_ANOTHER}")
    found = _position_in(saved)
    if None not in (expected, found) and found != expected:
        raise CheckpointError(
            f"{path}: the schedule is at step {found}, the manifest at step {expected}; they belong to different "
            f"checkpoints: {TAKE_ANOTHER}"
        )


def _check_generators(folder: Path, run: SavedRun) -> None:
    """Checks that the states of the random generators exist. Trainer would silently continue without them."""
    if run.num_ranks == 1 and (folder / "rng_state.pth").is_file():
        names = ["rng_state.pth"]
    else:
        names = [f"rng_state_{rank}.pth" for rank in range(run.num_ranks)]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing; dropout on its rank would differ; {TAKE_ANOTHER}")
        check_archive(folder / name)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class Resumed:
    """The saved record of the run that is resumed."""

    position: Position = Position(0, 0, 0)  # in the data
    passed: dict | None = None  # the current pass, see `Pass.facts`
    loss: float | None = None  # of the last step
    accumulation: int | None = None  # micro-batches per step; the losses of some models grow with it


def resumed_from(folder: str | os.PathLike | None) -> Resumed:
    """Reads the record of a checkpoint. A checkpoint with weights only has none."""
    run = None if folder is None else run_of(folder)
    if folder is None or run is None:
        return Resumed()
    position = position_of(folder, run) or Position(0, 0, 0)
    return Resumed(position, run.extra.get("pass"), run.loss, run.extra.get("accumulation"))
