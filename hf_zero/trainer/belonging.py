"""What Trainer writes beside weights and state: whether its files are there, and of the same moment as the rest."""

import os
import re
from pathlib import Path
from typing import Any

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_zero.checkpoint import Manifest
from hf_zero.checkpoint.foreign.trusted import check_archive, load_small
from hf_zero.checkpoint.manifest import FORMAT_VERSION, TAKE_ANOTHER, manifest_path
from hf_zero.checkpoint.plain import read_json
from hf_zero.errors import CheckpointError
from hf_zero.trainer.position import Position


_RNG_STATES = re.compile(r"rng_state(_\d+)?\.pth")


def check_belonging(folder: Path) -> None:
    """Compares the steps that the trainer's state, the manifest, the place in the data and the schedule speak of, and
    looks for the states of the generators.

    Args:
        folder (`Path`): a checkpoint of `ZeroTrainer`, or of another program.

    Raises:
        `CheckpointError`: naming the file that lacks, is damaged or is of another step.
    """
    step = read_step(folder)
    if not manifest_path(folder).is_file():
        for path in sorted(folder.iterdir()):
            if path.name == SCHEDULER_NAME or _RNG_STATES.fullmatch(path.name):
                check_archive(path)
        return
    manifest = Manifest.read(folder)
    steps: dict[str | Path, int | None] = {manifest_path(folder): manifest.step}
    position = position_of(folder, manifest)
    if position is not None:
        steps[f"{manifest_path(folder)} (place in the data)"] = position.step
    for where, found in steps.items():
        if found not in (None, step):
            raise CheckpointError(
                f"{where}: is of step {found}, {TRAINER_STATE_NAME} of step {step}; they are of different "
                f"checkpoints: {TAKE_ANOTHER}"
            )
    if manifest.step is not None:  # saved by a trainer
        _check_schedule(folder, manifest)
        _check_generators(folder, manifest)


def read_step(folder: Path) -> int:
    """The optimizer steps that a run had taken, by the trainer's own state."""
    path = folder / TRAINER_STATE_NAME
    try:
        step = read_json(path).get("global_step")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; {TAKE_ANOTHER}") from error
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: global_step is {step!r}, no number of steps; {TAKE_ANOTHER}")
    return step


def position_of(folder: str | os.PathLike, manifest: Manifest) -> Position | None:
    """Where a run was in its data.

    Raises:
        `CheckpointError`: the manifest says something else there.
    """
    saved = manifest.extra.get("position")
    if saved is None:
        return None
    names = ("epoch", "sample", "step")
    if not isinstance(saved, dict) or set(saved) != set(names) or not all(_is_count(saved[name]) for name in names):
        raise CheckpointError(f"{manifest_path(folder)}: {saved!r} is no place in the data; {TAKE_ANOTHER}")
    return Position(**saved)


def schedule_position(scheduler: Any) -> int | None:
    """How often a schedule was moved on, by the state that it saves; `None` where that does not tell."""
    return None if scheduler is None else _position_in(scheduler.state_dict())


def _position_in(saved: Any) -> int | None:
    position = saved.get("last_epoch") if isinstance(saved, dict) else None
    return position if _is_count(position) else None


def _check_schedule(folder: Path, manifest: Manifest) -> None:
    path, expected = folder / SCHEDULER_NAME, manifest.extra.get("schedule")
    if not path.is_file():
        if manifest.format_version == FORMAT_VERSION and expected is None:
            return  # the run had none
        raise CheckpointError(f"{path}: is missing, so the schedule would start anew; {TAKE_ANOTHER}")
    saved = load_small(path)
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: holds no schedule; {TAKE_ANOTHER}")
    found = _position_in(saved)
    if None not in (expected, found) and found != expected:
        raise CheckpointError(
            f"{path}: its schedule was moved on {found} times, its manifest says {expected}; they are of different "
            f"checkpoints: {TAKE_ANOTHER}"
        )


def _check_generators(folder: Path, manifest: Manifest) -> None:
    """Trainer goes on without them and says nothing."""
    if manifest.num_ranks == 1 and (folder / "rng_state.pth").is_file():
        names = ["rng_state.pth"]
    else:
        names = [f"rng_state_{rank}.pth" for rank in range(manifest.num_ranks)]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing, so its rank's dropout would differ; {TAKE_ANOTHER}")
        check_archive(folder / name)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
