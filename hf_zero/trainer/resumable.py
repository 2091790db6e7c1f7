"""Selects the checkpoint to resume from: the newest one that is intact."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint import Manifest, check_checkpoint
from hf_zero.checkpoint.convert import OtherProgramError, program_of
from hf_zero.checkpoint.folders import read_json, recover
from hf_zero.checkpoint.manifest import TAKE_ANOTHER
from hf_zero.checkpoint.plain import is_plain
from hf_zero.checkpoint.trusted import check_archive
from hf_zero.errors import CheckpointError, MissingCheckpointError
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.disk_space import checkpoints_in


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from."""

    folder: str | None  # the newest intact checkpoint
    faults: dict[str, str]  # errors of newer checkpoints by folder, newest first


def newest_whole(output_dir: str, *, is_first: bool, strict: bool = False) -> Choice:
    """Returns the newest intact checkpoint. All ranks must call it, and get the same result.

    Every rank reads the small files, and the ranks share the verification of tensors. The rank with `is_first` logs
    which checkpoints are skipped and why.

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
    state = PartialState()
    checks: list[Callable[[], None]] = [lambda: check_resumable(folder)]
    if reads_tensors:
        checks.append(lambda: _check_tensors(folder, state.process_index, state.num_processes))
    for check in checks:
        fault = next((fault for fault in gather_object([_fault(check)]) if fault is not None), None)
        if fault is not None:
            return fault
    return None


def _check_tensors(folder: Path, index: int, count: int) -> None:
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_tensors(folder, manifest.tensors[index::count])


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
    if not folder.is_dir():
        raise MissingCheckpointError(f"{folder}: does not exist; resume from another checkpoint")
    if (program := program_of(folder)) is not None:
        raise OtherProgramError(
            f"{folder}: is a checkpoint of {program.name}; convert it with hf-zero convert {folder} NEW, and resume "
            "from NEW"
        )
    if not is_plain(folder):
        check_checkpoint(folder)
    else:  # no manifest lists its files
        for path in sorted((*folder.glob("*.pt"), *folder.glob("*.pth"))):
            check_archive(path)
    read_step(folder)


def _fault(check: Callable[[], None]) -> CheckpointError | None:
    try:
        check()
    except CheckpointError as error:
        return error
    except Exception as error:  # malformed content or a disk error: no rank may raise alone
        return CheckpointError(f"cannot be read ({type(error).__name__}: {error})")
    return None


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
