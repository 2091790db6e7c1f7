"""What `output_dir` holds before a run begins: the model that an earlier run has left, which is not lost unasked.

A report lies beside a model from the end of its run to the beginning of the next training there.
"""

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from hf_zero.checkpoint.table import TABLE_NAME
from hf_zero.errors import ConfigError
from hf_zero.recipes.artifacts import REPORT_FOLDER, REPORT_NAME
from hf_zero.recipes.log import LOG_NAME, read_log
from hf_zero.recipes.resolved import HIDDEN_NAME, RESOLVED_NAME, difference
from hf_zero.recipes.settings import AUTO, NEVER, Settings
from hf_zero.trainer import ZeroTrainingArguments
from hf_zero.trainer.disk_space import age_of, checkpoints_in


WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "adapter_model.bin",
)
# What a run leaves in its folder beside checkpoints, by exact names: the folder may hold files of the user's
# (deepspeed_config.json, tokenizer_notes.txt), which stay.
LEFT = (
    *WEIGHTS,
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "training_args.bin",
    TABLE_NAME,
    "README.md",
    REPORT_NAME,
    REPORT_FOLDER,
    LOG_NAME,
    RESOLVED_NAME,
    HIDDEN_NAME,
)


def holds_model(folder: Path) -> bool:
    """Whether a folder holds the weights of a model or adapter, those of its checkpoints apart."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def left_in(folder: Path, *, with_model: bool) -> list[Path]:
    """What an earlier run has left in a folder.

    Args:
        folder (`Path`): Its `output_dir`.
        with_model (`bool`): Whether its model, and what belongs to that, are meant too.
    """
    with_model = with_model and holds_model(folder)
    checkpoints = checkpoints_in(folder)
    patterns = LEFT if with_model else (LOG_NAME, RESOLVED_NAME, HIDDEN_NAME) if checkpoints else ()
    return sorted({*checkpoints, *(path for pattern in patterns for path in folder.glob(pattern))})


def check_model_is_kept(settings: Settings, folder: Path) -> None:
    """Refuses a run that would write its model over that of another one.

    Args:
        settings ([`Settings`]): Of the run.
        folder (`Path`): Its `output_dir`.

    Raises:
        ConfigError: Saying what differs from the run that left the model.
    """
    if settings.overwrite_output_dir or settings.resume == NEVER or not holds_model(folder):
        return
    whose = _why_another(settings, folder)
    if whose is not None:
        raise ConfigError(
            f"output_dir {str(folder)!r}: holds a model of another run ({whose}); give another output_dir, "
            "--resume never, which moves it aside, or --overwrite_output_dir"
        )


def check_finished_is_kept(settings: Settings, folder: Path) -> None:
    """Refuses to go on from a checkpoint that a finished run has left behind it, unless a longer one is asked for.

    Args:
        settings ([`Settings`]): Of the run.
        folder (`Path`): Its `output_dir`, with checkpoints.

    Raises:
        ConfigError: Saying what differs from the run that has finished.
    """
    end, newest = _end_of(folder), checkpoints_in(folder)[0]
    step = age_of(newest)[0]
    if end is None or end <= step:
        return
    changed = difference(settings, folder)
    if changed is not None and not _is_longer(settings, folder, end):
        raise ConfigError(
            f"output_dir {str(folder)!r}: holds the model of a run that has ended at step {end} "
            f"({_in_words(changed)}), and its newest checkpoint is of step {step}; --resume {newest} trains "
            f"again from there and replaces the model, --resume {NEVER} starts anew and moves it aside"
        )


def _is_longer(settings: Settings, folder: Path, end: int) -> bool:
    """Whether more is asked for than the run in a folder was, which has ended at a step."""
    steps, epochs = (difference(settings, folder, [name]) for name in ("max_steps", "num_train_epochs"))
    if steps is not None:
        return steps[1] > end
    return settings.training["max_steps"] <= 0 and epochs is not None and epochs[1] > epochs[2]


def finished(settings: Settings, training: ZeroTrainingArguments) -> str | None:
    """What to say where this very run has ended before. All ranks call it.

    Args:
        settings ([`Settings`]): Of the run.
        training ([`ZeroTrainingArguments`]): Of this process.

    Returns:
        `str` or `None`: One line, the same on all ranks; `None` where there is something to do.
    """
    told = _told(settings, Path(training.output_dir))
    return next((each for each in gather_object([told]) if each is not None), None)


def _told(settings: Settings, folder: Path) -> str | None:
    if settings.resume != AUTO or not holds_model(folder) or _why_another(settings, folder) is not None:
        return None
    log, end = _log_of(folder), _end_of(folder)
    losses = [entry["loss"] for entry in log if entry.get("loss") is not None]
    steps = "all steps" if end is None else f"step {end}"
    loss = f", last loss {losses[-1]:.4g}" if losses else ""
    longer = ", more epochs or steps go on from its newest checkpoint" if checkpoints_in(folder) else ""
    upload = f", `push {folder}` uploads it" if settings.training["push_to_hub"] else ""
    return (
        f"{folder}: this run has ended ({steps}{loss}; report: {folder / REPORT_NAME}), and nothing is left to train; "
        f"--resume {NEVER} trains anew and moves it aside{longer}{upload}"
    )


def _log_of(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / LOG_NAME) if (folder / LOG_NAME).is_file() else []


def _end_of(folder: Path) -> int | None:
    """The last step of the run that has left its finished model here; `None` where none has, or nothing tells."""
    log = _log_of(folder) if holds_model(folder) and (folder / REPORT_NAME).exists() else []
    return log[-1]["step"] if log else None


def _why_another(settings: Settings, folder: Path) -> str | None:
    """Why the model in a folder is not what this run would leave; `None` where it is."""
    if not any((folder / name).exists() for name in (RESOLVED_NAME, HIDDEN_NAME)):
        return f"there is no {RESOLVED_NAME}"
    changed = difference(settings, folder)
    if changed is not None:
        return _in_words(changed)
    return None if (folder / REPORT_NAME).exists() else f"there is no {REPORT_NAME}, so it did not end"


def _in_words(changed: tuple[str, Any, Any]) -> str:
    return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"
