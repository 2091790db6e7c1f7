"""The resolved configuration: what a run was asked and what was left at its default, as YAML that repeats the run."""

import shlex
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import program
from hf_zero.recipes.settings import NEVER, Settings, parse_settings
from hf_zero.recipes.tasks import TASKS


RESOLVED_NAME = "resolved.yaml"
HIDDEN_NAME = f"_{RESOLVED_NAME}"  # it names folders of this machine, and Trainer uploads nothing that begins so
SECRETS = ("hub_token", "push_to_hub_token")
# Where a run starts, and which process this is, are no part of what it is.
NOT_OF_THE_RUN = (*SECRETS, "resume_from_checkpoint", "local_rank")
# A run that goes on keeps its task, the task's own arguments but for these, its decisive training arguments, and those
# that say in which order rows come. These say how rows are read and attention is computed; the results are the same.
FREE = ("dataset_num_proc", "skip_bad_rows", "attn_implementation")
# These say how a run is watched, what of it is kept, and where it is told and uploaded; its model is the same.
NOT_OF_THE_MODEL = (
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
    *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "include_num_input_tokens_seen"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "skip_memory_metrics", *FREE),
)
ORDER = ("seed", "data_seed", "train_sampling_strategy")


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """The keys of a run that differ from their defaults.

    Args:
        settings ([`Settings`]): Of the run.

    Returns:
        `dict[str, Any]`: Plain values by key, the task first.
    """
    defaults = _values(parse_settings(settings.task, []))
    return {
        key: value for key, value in _values(settings).items() if key == "task" or value != defaults.get(key, value)
    }


def resolved_name(settings: Settings) -> str:
    """The name of the file that the configuration goes into."""
    return HIDDEN_NAME if settings.training["push_to_hub"] else RESOLVED_NAME


def repeating_command(settings: Settings, folder: str) -> str:
    """The command line that repeats a run, from the folder in which it was started.

    Args:
        settings ([`Settings`]): Of the run.
        folder (`str`): Where its configuration is.
    """
    path = shlex.quote(str(Path(folder) / resolved_name(settings)))
    return f"{program()} {settings.task} --config {path} --resume {NEVER}"


def resolved_text(settings: Settings) -> str:
    """YAML of all keys: those that differ from their defaults, then the others as they were.

    Args:
        settings ([`Settings`]): Of the run.
    """
    set_by_user = non_default_settings(settings)
    values = {key: value for key, value in _values(settings).items() if key not in set_by_user}
    values = {key: value for key, value in values.items() if value not in (None, [])}
    return (
        f"# Repeats this run: {repeating_command(settings, settings.training['output_dir'])}\n"
        f"{yaml_text(set_by_user)}\n"
        "# What was left at its default, so that a version with other defaults repeats it too.\n"
        f"{yaml_text(values)}"
    )


def yaml_text(values: dict[str, Any]) -> str:
    """Lines of `key: value`, in the order given."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)


def check_unchanged(settings: Settings, folder: Path) -> None:
    """Refuses to go on with a run whose task, model or data were others.

    Args:
        settings ([`Settings`]): Of this run.
        folder (`Path`): Where the run before left its configuration; without one nothing is compared.

    Raises:
        ConfigError: Naming the first key that has changed.
    """
    changed = _changed(settings, folder, _compared(settings))
    if changed is not None:
        key, now, before = changed
        raise ConfigError(
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of ({_path(folder)}); go on "
            "with the same, or give --resume never or another output_dir"
        )


def difference(settings: Settings, folder: Path, keys: Iterable[str] | None = None) -> tuple[str, Any, Any] | None:
    """In what a run's model differs from that of the one before. Where it is told from, how it is watched, and by how
    many processes it is trained, does not count.

    Args:
        settings ([`Settings`]): Of this run.
        folder (`Path`): Where the run before left its configuration; without one nothing is compared.
        keys (`Iterable[str]`, *optional*): What is compared; by default all that the model depends on.

    Returns:
        The first key that has changed, its value now and its value before; `None` where all is as it was.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    if keys is None:
        ignored = {*NOT_OF_THE_MODEL, "num_processes", "output_dir"}
        keys = [key for key in _values(settings) if key not in ignored]
    return _changed(settings, folder, keys)


def _changed(settings: Settings, folder: Path, keys: Iterable[str]) -> tuple[str, Any, Any] | None:
    path = _path(folder)
    if path is None:
        return None
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({' '.join(str(error).split())}), so this run cannot be compared with the one "
            "before; --resume never starts anew"
        ) from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: holds no keys, so this run cannot be compared with it; --resume never starts anew")
    now, defaults = _values(settings), _values(parse_settings(settings.task, []))
    before = {**defaults, **saved}
    return next(((key, now[key], before[key]) for key in keys if now[key] != before[key]), None)


def _path(folder: Path) -> Path | None:
    """The configuration that a run has left in a folder."""
    return next((path for name in (RESOLVED_NAME, HIDDEN_NAME) if (path := folder / name).exists()), None)


def _compared(settings: Settings) -> list[str]:
    own = [field.name for field in fields(settings.arguments) if field.name not in FREE]
    return ["task", *own, *TASKS[settings.task].decisive, *ORDER]


def _values(settings: Settings) -> dict[str, Any]:
    """All keys of a run, as YAML knows them."""
    values = {
        "task": settings.task,
        **vars(settings.arguments),
        **settings.training,
        "num_processes": settings.num_processes,
    }
    return {key: _plain(value) for key, value in values.items() if key not in NOT_OF_THE_RUN}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
