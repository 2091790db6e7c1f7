"""Compares a run with an earlier one, by its settings and by the config of its model."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from hf_zero.checkpoint.format import read_json
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.artifacts import configuration_of
from hf_zero.recipes.loading import ADAPTER_CONFIG_NAME, load_config, resolve_model
from hf_zero.recipes.settings import NEVER, Settings, parse_settings
from hf_zero.recipes.tasks import TASKS


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
# Numbers of a config that say no size: a tokenizer or a task may set them.
NO_SIZES = ("_id", "_ids", "_index", "label2id")

Change = tuple[str, Any, Any]  # a key, its value now and its value before


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
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of "
            f"({configuration_of(folder)}); go on with the same, or give --resume never or another output_dir"
        )


def difference(settings: Settings, folder: Path, keys: Iterable[str] | None = None) -> Change | None:
    """Finds in what a run's model differs from that of an earlier run.

    Where it is told from, how it is watched, and by how many processes it is trained, does not count.

    Args:
        settings ([`Settings`]): Of this run.
        folder (`Path`): Where the run before left its configuration; without one nothing is compared.
        keys (`Iterable[str]`, *optional*): What is compared; by default all that the model depends on.

    Returns:
        `Change`: The first key that has changed; `None` where all is as it was.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    if keys is None:
        ignored = {*NOT_OF_THE_MODEL, "num_processes", "output_dir"}
        keys = [key for key in settings.values() if key not in ignored]
    return _changed(settings, folder, keys)


def _changed(settings: Settings, folder: Path, keys: Iterable[str]) -> Change | None:
    path = configuration_of(folder)
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
    now, defaults = settings.values(), parse_settings(settings.task, []).values()
    before = {**defaults, **saved}
    return _first_change(now, before, keys)


def _first_change(now: dict[str, Any], before: dict[str, Any], keys: Iterable[str]) -> Change | None:
    return next(((key, now[key], before[key]) for key in keys if key in before and now[key] != before[key]), None)


def in_words(changed: Change) -> str:
    """Returns a change in words."""
    return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"


def _compared(settings: Settings) -> list[str]:
    own = [field.name for field in fields(settings.arguments) if field.name not in FREE]
    return ["task", *own, *getattr(TASKS[settings.task].load(), "decisive", ()), *ORDER]


def check_same_model(settings: Settings, checkpoints: Iterable[Path]) -> None:
    """Refuses to go on from the checkpoints of another model. Configs that cannot be read are left to loading.

    Args:
        settings ([`Settings`]): Of the run.
        checkpoints (`Iterable[Path]`): In the order in which they would be taken; the first with a config is compared.

    Raises:
        ConfigError: Naming the checkpoint, and what differs.
    """
    for checkpoint in checkpoints:
        found = _difference(settings.arguments, checkpoint)
        if found is not None:
            raise ConfigError(
                f"output_dir {settings.training['output_dir']!r}: {checkpoint} is of another model ({found}); give "
                f"another output_dir, or --resume {NEVER}, which moves it aside"
            )
        if any((checkpoint / name).is_file() for name in ("config.json", ADAPTER_CONFIG_NAME)):
            return


def _difference(arguments: Any, checkpoint: Path) -> str | None:
    if (checkpoint / ADAPTER_CONFIG_NAME).is_file():
        return _of_adapter(arguments, checkpoint)
    before = _config(str(checkpoint)) if (checkpoint / "config.json").is_file() else None
    if before is not None and arguments.use_peft:
        return "it is no adapter, and use_peft trains one"
    now = before and _config(resolve_model(arguments.model_name_or_path), arguments.model_revision)
    if not before or not now:
        return None
    text = now.get_text_config()
    if before.model_type != now.model_type and before.model_type == text.model_type:
        now = text  # of a model of texts and images, AutoModelForCausalLM makes the part for texts
    sizes_now, sizes_before = ({"model_type": config.model_type, **_sizes(config)} for config in (now, before))
    changed = _first_change(sizes_now, sizes_before, sizes_now)
    return changed and in_words(changed)


def _of_adapter(arguments: Any, checkpoint: Path) -> str | None:
    if not arguments.use_peft:
        return "it is an adapter, and use_peft is not set"
    try:
        saved = read_json(checkpoint / ADAPTER_CONFIG_NAME)
    except (CheckpointError, OSError):
        return None
    changed = _first_change({"lora_r": arguments.lora_r}, {"lora_r": saved.get("r")}, ["lora_r"])
    return changed and in_words(changed)


def _config(path: str, revision: str | None = None) -> PretrainedConfig | None:
    try:
        return load_config(path, revision)
    except ConfigError:
        return None


def _sizes(config: PretrainedConfig, prefix: str = "") -> dict[str, Any]:
    """Returns the numbers of a config that determine shapes, with those of the model's parts."""
    sizes = {
        prefix + key: value
        for key, value in config.to_dict().items()
        if not key.endswith(NO_SIZES) and _is_size(value)
    }
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            sizes |= _sizes(part, f"{prefix}{name}.")
    return sizes


def _is_size(value: Any) -> bool:
    return type(value) is int or isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
