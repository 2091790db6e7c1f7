"""Whether checkpoints are of the model that a run names: by their configs, before a weight is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from hf_zero.checkpoint.plain import read_json
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.loading import ADAPTER_CONFIG_NAME, quiet
from hf_zero.recipes.models import resolve_model
from hf_zero.recipes.settings import NEVER, Settings


# Numbers of a config that say no size: a tokenizer or a task may set them.
NO_SIZES = ("_id", "_ids", "_index", "label2id")


def check_same_model(settings: Settings, checkpoints: Iterable[Path]) -> None:
    """Refuses to go on from the checkpoints of another model. What cannot be read is told when it is loaded.

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
    return _first_unlike(sizes_now, sizes_before)


def _of_adapter(arguments: Any, checkpoint: Path) -> str | None:
    if not arguments.use_peft:
        return "it is an adapter, and use_peft is not set"
    try:
        saved = read_json(checkpoint / ADAPTER_CONFIG_NAME)
    except (CheckpointError, OSError):
        return None
    return _first_unlike({"lora_r": arguments.lora_r}, {"lora_r": saved.get("r")})


def _config(path: str, revision: str | None = None) -> PretrainedConfig | None:
    try:
        with quiet():
            return AutoConfig.from_pretrained(path, revision=revision or "main")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sizes(config: PretrainedConfig, prefix: str = "") -> dict[str, Any]:
    """The numbers that shapes follow from, those of a model's parts too."""
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


def _first_unlike(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    unlike = (key for key in now if key in before and now[key] != before[key])
    return next((f"{key}: {now[key]!r} now, {before[key]!r} there" for key in unlike), None)
