"""Where a run starts: at the newest checkpoint of the same run, at one that is named, or anew."""

import json
from pathlib import Path

from hf_zero.comm.agreement import on_first, together
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.log import LOG_NAME
from hf_zero.recipes.resolved import HIDDEN_NAME, RESOLVED_NAME, check_unchanged
from hf_zero.recipes.settings import AUTO, NEVER, Settings
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments
from hf_zero.trainer.resuming import check_state, checkpoint_faults, newest_of


# Trainer leaves what begins so out of what it uploads.
EARLIER = "_earlier"


def check_resume(settings: Settings) -> None:
    """Refuses, before a process is started, to go on from what is not there or from another run.

    Args:
        settings ([`Settings`]): Of the run.

    Raises:
        ConfigError: If the checkpoint that is named is no folder, if task, model or data have changed, or if a run
            that starts anew would move the model that it starts from.
        CheckpointError: If the checkpoint that is named is not complete.
    """
    folder = Path(settings.training["output_dir"])
    if settings.resume == NEVER:
        _check_model_stays(settings.arguments.model_name_or_path, folder)
        return
    if settings.resume == AUTO:
        if any(folder.glob("checkpoint-*")):
            check_unchanged(settings, folder)
        return
    checkpoint = Path(settings.resume)
    if not checkpoint.is_dir():
        raise ConfigError(f"resume {settings.resume!r}: no such folder; give auto, never or a checkpoint's folder")
    check_state(checkpoint)
    check_unchanged(settings, checkpoint.absolute().parent)


def _check_model_stays(model: str | None, folder: Path) -> None:
    model_path = Path(model or "").expanduser().resolve()
    for checkpoint in folder.glob("checkpoint-*"):
        if model_path.is_relative_to(checkpoint.resolve()):
            raise ConfigError(
                f"model_name_or_path {model!r}: lies in output_dir {str(folder)!r}, whose checkpoints --resume never "
                "moves away; give another output_dir"
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
    faults = checkpoint_faults(training.output_dir)
    if faults and None not in faults.values():
        reasons = "; ".join(f"{Path(path).name}: {fault}" for path, fault in faults.items())
        raise CheckpointError(
            f"{training.output_dir}: none of its checkpoints can be resumed from ({reasons}); --resume never starts "
            "anew"
        )
    return newest_of(faults, is_first=training.process_index == 0)


def told(checkpoint: str) -> str:
    """What to say of the checkpoint that a run goes on from."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    step, max_steps = state["global_step"], state.get("max_steps")
    return f"resume: going on from {checkpoint}, step {step} of {max_steps}; --resume never starts anew"


def set_aside(trainer: ZeroTrainer) -> str | None:
    """Moves the checkpoints of a run before out of the way of a run that starts anew. All ranks call it.

    Were they left, the next `--resume auto` could take them for this run's.

    Args:
        trainer ([`ZeroTrainer`]): Of the run that starts.

    Returns:
        `str` or `None`: The folder that they are in now, on the rank that moved them.
    """
    comm, folder = trainer.accelerator.shard(trainer.model).comm, Path(trainer.args.output_dir)
    return together(comm, f"{folder}: setting aside its checkpoints", on_first(comm, lambda: _set_aside(folder)))


def _set_aside(folder: Path) -> str | None:
    checkpoints = sorted(folder.glob("checkpoint-*"))
    if not checkpoints:
        return None
    number = 1
    while (folder / f"{EARLIER}-{number}").exists():
        number += 1
    target = folder / f"{EARLIER}-{number}"
    target.mkdir()
    beside = [folder / name for name in (RESOLVED_NAME, HIDDEN_NAME, LOG_NAME) if (folder / name).exists()]
    for path in (*checkpoints, *beside):
        path.rename(target / path.name)
    return str(target)
