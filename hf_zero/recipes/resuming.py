"""Where a run starts: at the newest checkpoint of the same run, at one that is named, or anew."""

import json
from functools import partial
from pathlib import Path

from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.occupied import check_finished_is_kept, check_model_is_kept, left_in
from hf_zero.recipes.resolved import check_unchanged
from hf_zero.recipes.same_model import check_same_model
from hf_zero.recipes.settings import AUTO, NEVER, Settings
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments
from hf_zero.trainer.disk_space import checkpoints_in
from hf_zero.trainer.resumable import check_resumable, newest_whole


# Trainer leaves what begins so out of what it uploads.
EARLIER = "_earlier"


def check_resume(settings: Settings) -> None:
    """Refuses, before a process is started, to go on from what is not there or from another run.

    Args:
        settings ([`Settings`]): Of the run.

    Raises:
        ConfigError: If the checkpoint that is named is no folder, if task, model or data have changed, if a run
            that starts anew would move the model that it starts from, or if the model of another run would be lost.
        CheckpointError: If the checkpoint that is named is not complete.
    """
    folder = Path(settings.training["output_dir"])
    if settings.resume == NEVER:
        _check_model_stays(settings, folder)
        return
    if settings.resume == AUTO:
        if checkpoints_in(folder):
            check_unchanged(settings, folder)
            check_same_model(settings, checkpoints_in(folder))
            check_finished_is_kept(settings, folder)
        else:
            check_model_is_kept(settings, folder)
        return
    checkpoint = Path(settings.resume)
    if not checkpoint.is_dir():
        raise ConfigError(f"resume {settings.resume!r}: no such folder; give auto, never or a checkpoint's folder")
    check_resumable(checkpoint, needs_config=True)
    check_unchanged(settings, checkpoint.absolute().parent)
    check_same_model(settings, [checkpoint])
    if checkpoint.resolve().parent != folder.resolve():
        check_model_is_kept(settings, folder)


def _check_model_stays(settings: Settings, folder: Path) -> None:
    model, with_model = settings.arguments.model_name_or_path or "", not settings.overwrite_output_dir
    path = Path(model).expanduser().resolve()
    moved = {left.resolve() for left in left_in(folder, with_model=with_model)}
    if moved.intersection((path, *path.parents)) or with_model and path == folder.resolve():
        raise ConfigError(
            f"model_name_or_path {model!r}: lies in output_dir {str(folder)!r}, whose checkpoints and model --resume "
            "never moves away; give another output_dir"
        )


def checkpoint_of(settings: Settings, training: ZeroTrainingArguments) -> str | None:
    """The checkpoint to go on from; `None` to start anew. All ranks call it.

    Args:
        settings ([`Settings`]): Of the run.
        training ([`ZeroTrainingArguments`]): Of this process.

    Raises:
        CheckpointError: If there are checkpoints, and none that all ranks find complete: what they hold is not given
            up unless that is asked for.
    """
    if settings.resume == NEVER:
        return None
    if settings.resume == AUTO:
        return _newest_complete(training)
    return settings.resume


def _newest_complete(training: ZeroTrainingArguments) -> str | None:
    choice = newest_whole(
        training.output_dir,
        is_first=training.process_index == 0,
        strict=training.zero_resume_strict,
        needs_config=True,
    )
    if choice.folder is None and choice.faults:
        reasons = "; ".join(f"{Path(path).name}: {fault}" for path, fault in choice.faults.items())
        raise CheckpointError(
            f"{training.output_dir}: none of its checkpoints can be resumed from ({reasons}); --resume never starts "
            "anew"
        )
    return choice.folder


def resume_message(checkpoint: str) -> str:
    """Returns the line that names the checkpoint from which a run goes on."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    step, max_steps = state["global_step"], state.get("max_steps")
    return f"resume: going on from {checkpoint}, step {step} of {max_steps}; --resume never starts anew"


def set_aside(trainer: ZeroTrainer, settings: Settings) -> str | None:
    """Moves what a run before has left out of the way of a run that starts anew. All ranks call it.

    Were its checkpoints left, the next `--resume auto` could take them for this run's.

    Args:
        trainer ([`ZeroTrainer`]): Of the run that starts.
        settings ([`Settings`]): Of the same: whether it is to replace the model.

    Returns:
        `str` or `None`: The folder that they are in now, on the rank that moved them.
    """
    comm, folder = trainer.accelerator.shard(trainer.model).comm, Path(trainer.args.output_dir)
    act = partial(_set_aside, folder, with_model=not settings.overwrite_output_dir)
    return run_on_all_ranks(comm, f"{folder}: setting aside what it holds", on_first(comm, act))


def _set_aside(folder: Path, *, with_model: bool) -> str | None:
    found = left_in(folder, with_model=with_model)
    if not found:
        return None
    number = 1
    while (folder / f"{EARLIER}-{number}").exists():
        number += 1
    target = folder / f"{EARLIER}-{number}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return str(target)
