"""The checkpoints of a run: which one to resume from, and which ones `--save_total_limit` deletes."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import Manifest, check_checkpoint
from hf_zero.checkpoint.convert import OtherProgramError, program_of
from hf_zero.checkpoint.folders import read_json, recover, remove_folder
from hf_zero.checkpoint.manifest import TAKE_ANOTHER
from hf_zero.checkpoint.plain import is_plain
from hf_zero.checkpoint.trusted import check_archive
from hf_zero.errors import CheckpointError, MissingCheckpointError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from."""

    folder: str | None  # the newest intact checkpoint
    faults: dict[str, str]  # errors of newer checkpoints by folder, newest first

    @property
    def reasons(self) -> str:
        """Why checkpoints are skipped, in parentheses for a message; empty if none is."""
        found = "; ".join(f"{Path(path).name}: {fault}" for path, fault in self.faults.items())
        return f" ({found})" if found else ""


def newest_whole(output_dir: str, *, say: Callable[[str], object], strict: bool = False) -> Choice:
    """Returns the newest intact checkpoint. All ranks must call it, and get the same result.

    Every rank reads the small files, and the ranks share the verification of tensors. `say` is called with one line
    for each checkpoint that is skipped.

    Raises:
        `CheckpointError`: If `strict` is set and the newest checkpoint is damaged, or if it is another program's.
    """
    folder = Path(output_dir)
    recover(folder)
    gather_object([None])  # wait until `recover` is done on all ranks
    faults: dict[str, str] = {}
    for path in gather_object([checkpoints_in(folder)])[0]:
        fault = fault_of(path, reads_tensors=True)
        if fault is None:
            return Choice(str(path), faults)
        if isinstance(fault, OtherProgramError):  # the user wants to continue it, not an older or a new run
            raise fault
        if strict:
            raise CheckpointError(
                f"{fault} (--zero_resume_strict: {path} is the newest checkpoint, and older ones are not used)"
            )
        faults[str(path)] = str(fault)
        say(f"{path} is skipped: {fault}")
    return Choice(None, faults)


def fault_of(folder: Path, *, reads_tensors: bool) -> CheckpointError | None:
    """Returns the reason why a run cannot resume from a checkpoint, or `None`. All ranks must call it, and get the
    same result. With `reads_tensors`, the ranks share the verification of tensors. Otherwise, tensors are verified
    when they are loaded."""
    state, fault = PartialState(), None
    try:
        manifest = check_resumable(folder)
        if manifest is not None and reads_tensors:
            manifest.check_tensors(folder, manifest.tensors[state.process_index :: state.num_processes])
    except CheckpointError as error:
        fault = error
    except Exception as error:  # malformed content or a disk error: no rank may raise alone
        fault = CheckpointError(f"cannot be read ({type(error).__name__}: {error})")
    return next((found for found in gather_object([fault]) if found is not None), None)


def chosen(args: ZeroArgumentsMixin) -> str:
    """Returns the checkpoint for `resume_from_checkpoint=True`. All ranks must call it, and get the same result.
    Raises [`CheckpointError`] if there is none, or if the newest is damaged and `zero_resume_strict` is set."""
    say = logger.warning if args.process_index == 0 else lambda _: None
    choice = newest_whole(args.output_dir, say=say, strict=args.zero_resume_strict)
    if choice.folder is None:
        raise MissingCheckpointError(
            f"{args.output_dir}: has no complete checkpoint to resume from{choice.reasons}; start a new run"
        )
    if choice.faults:
        say(f"resuming from {choice.folder}")
    return choice.folder


def check_resumable(folder: str | Path) -> Manifest | None:
    """Checks that a run can resume from a folder and that the files to read are unchanged, except the values of
    tensors, which are verified later. Returns its manifest, if it has one."""
    folder, manifest = Path(folder), None
    if not folder.is_dir():
        raise MissingCheckpointError(f"{folder}: does not exist; resume from another checkpoint")
    if (program := program_of(folder)) is not None:
        raise OtherProgramError(
            f"{folder}: is a checkpoint of {program.name}; convert it with hf-zero convert {folder} NEW, and resume "
            "from NEW"
        )
    if not is_plain(folder):
        manifest = check_checkpoint(folder)
    else:  # no manifest lists its files
        for path in sorted((*folder.glob("*.pt"), *folder.glob("*.pth"))):
            check_archive(path)
    read_step(folder)
    return manifest


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
