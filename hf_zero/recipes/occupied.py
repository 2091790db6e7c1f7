"""What `output_dir` holds before a run begins: the model that an earlier run has left, which is not lost unasked."""

from pathlib import Path

from accelerate.utils import gather_object

from hf_zero.checkpoint.table import TABLE_NAME
from hf_zero.errors import ConfigError
from hf_zero.recipes.artifacts import REPORT_FOLDER, REPORT_NAME
from hf_zero.recipes.log import LOG_NAME, read_log
from hf_zero.recipes.resolved import HIDDEN_NAME, RESOLVED_NAME, difference
from hf_zero.recipes.settings import AUTO, NEVER, Settings
from hf_zero.trainer import ZeroTrainingArguments
from hf_zero.trainer.rotation import checkpoints_in


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


def finished(settings: Settings, training: ZeroTrainingArguments) -> str | None:
    """What to say where this very run has ended before and has left no checkpoint. All ranks call it.

    Args:
        settings ([`Settings`]): Of the run.
        training ([`ZeroTrainingArguments`]): Of this process.

    Returns:
        `str` or `None`: One line, the same on all ranks; `None` where there is something to do.
    """
    told = _told(settings, Path(training.output_dir))
    return next((each for each in gather_object([told]) if each is not None), None)


def _told(settings: Settings, folder: Path) -> str | None:
    is_over = settings.resume == AUTO and holds_model(folder) and not checkpoints_in(folder)
    if not is_over or _why_another(settings, folder) is not None:
        return None
    log = read_log(folder / LOG_NAME) if (folder / LOG_NAME).is_file() else []
    losses = [entry["loss"] for entry in log if entry.get("loss") is not None]
    steps = f"step {log[-1]['step']}" if log else "all steps"
    loss = f", last loss {losses[-1]:.4g}" if losses else ""
    return (
        f"{folder}: this run has ended ({steps}{loss}; report: {folder / REPORT_NAME}), and nothing is left to train; "
        f"--resume {NEVER} trains anew and moves it aside"
    )


def _why_another(settings: Settings, folder: Path) -> str | None:
    """Why the model in a folder is not what this run would leave; `None` where it is."""
    if not any((folder / name).exists() for name in (RESOLVED_NAME, HIDDEN_NAME)):
        return f"there is no {RESOLVED_NAME}"
    changed = difference(settings, folder)
    if changed is not None:
        return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"
    return None if (folder / REPORT_NAME).exists() else f"there is no {REPORT_NAME}, so it did not end"
