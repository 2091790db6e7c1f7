"""Checks of training arguments before anything is loaded: settings that ZeRO does not support. transformers checks the
others. This module does not import Trainer, which takes seconds."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError


Settings = Mapping[str, Any]  # fields of the training arguments, by name

# The values of `--optim` whose optimizers run on shards, see `hf_zero.optim.granularity`.
SUPPORTED_OPTIMS = frozenset(
    "adamw_torch adamw_torch_fused adamw_torch_npu_fused sgd adagrad rmsprop lion_32bit paged_lion_32bit "
    "paged_adamw_32bit rmsprop_bnb rmsprop_bnb_32bit adafactor schedule_free_adamw schedule_free_radam "
    "schedule_free_sgd adamw_torch_8bit adamw_torch_4bit adamw_bnb_8bit adamw_8bit paged_adamw_8bit lion_8bit "
    "paged_lion_8bit rmsprop_bnb_8bit ademamix ademamix_8bit".split()
)


def check_arguments(settings: Settings) -> None:
    """Raises [`ConfigError`] for the first unsupported setting of parsed training arguments."""
    _raise_first(settings, (_optimizer, *ACTIVATION_CHECKS, _precision, _saving, _offload_folder))


def check_activations(settings: Settings) -> None:
    """Raises [`ConfigError`] for activation settings that conflict with other settings."""
    _raise_first(settings, ACTIVATION_CHECKS)


def check_output_dir(output_dir: str | None, name: str = "output_dir") -> None:
    """Checks that a folder is writable or can be created, without creating it. Raises [`ConfigError`] otherwise."""
    if not output_dir:
        raise ConfigError(f"{name}: not set; set the folder for the trained model, for example --{name} outputs/mine")
    folder = Path(output_dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    reason = _unwritable(existing)
    if reason is not None:
        raise ConfigError(f"{name} {output_dir!r}: {existing} is not writable ({reason}); choose another folder")


def _raise_first(settings: Settings, checks: tuple[Callable[[Settings], str | None], ...]) -> None:
    message = next(filter(None, (check(settings) for check in checks)), None)
    if message is not None:
        raise ConfigError(message)


def _optimizer(settings: Settings) -> str | None:
    optim = str(getattr(settings["optim"], "value", settings["optim"]))
    if optim in SUPPORTED_OPTIMS:
        return None
    return (
        f"optim: {optim} is not known to run on shards; use one of {', '.join(sorted(SUPPORTED_OPTIMS))}, or for Muon "
        "optimizer_cls_and_kwargs=(hf_zero.MuonWithAdamW, {...})"
    )


def _precision(settings: Settings) -> str | None:
    if settings["zero_autocast"] and not (settings["bf16"] or settings["fp16"]):
        return "zero_autocast: requires --bf16 or --fp16, and neither is set; add --bf16"
    return None


def _saving(settings: Settings) -> str | None:
    strategy = str(getattr(settings["save_strategy"], "value", settings["save_strategy"]))
    if strategy == "steps" and settings["save_steps"] <= 0:
        return f"save_steps: {settings['save_steps']:g} saves nothing; pass a positive number, or --save_strategy no"
    return None


def _offload_folder(settings: Settings) -> str | None:
    given = settings["zero_offload_dir"]
    if given is None or (reason := _unwritable(Path(given).expanduser().absolute())) is None:
        return None
    return f"zero_offload_dir {given!r}: not writable ({reason}); create it, preferably on a local NVMe disk"


def _activations(settings: Settings) -> str | None:
    # the new and the old name
    is_checkpointed = any(settings.get(f"{name}_checkpointing") for name in ("activation", "gradient"))
    if settings["zero_partition_activations"] and not is_checkpointed:
        return (
            "zero_partition_activations: partitions the inputs of checkpointed blocks, but gradient checkpointing is "
            "off; add --gradient_checkpointing"
        )
    for name, default in (("offload_activations", False), ("partition_activations", False), ("tiled_mlp", "1")):
        if str(settings[f"zero_{name}"]) != str(default) and settings["torch_compile"]:
            return f"zero_{name}: compiled blocks keep activations inside their graphs; remove --torch_compile"
    if settings["zero_offload_activations"] and settings.get("activation_offloading"):
        return "activation_offloading: offloads the same tensors as zero_offload_activations; use one of them"
    return None


def _chunked_loss(settings: Settings) -> str | None:
    if settings["zero_chunked_loss"] != "on":
        return None
    if settings.get("label_smoothing_factor"):
        return "zero_chunked_loss: label_smoothing_factor needs all logits; use auto or off, or remove one of them"
    if settings["zero_autocast"]:
        return "zero_chunked_loss: --zero_autocast casts the head's weight at each use; use one of them"
    return None


def _sequences(settings: Settings) -> str | None:
    others = ("torch_compile", "label_smoothing_factor", "use_liger_kernel", "zero_partition_activations")
    found = next((name for name in (*others, "eval_use_gather_object") if settings.get(name)), None)
    if settings["zero_sequence_parallel"] == 1 or found is None:
        return None
    return f"zero_sequence_parallel: not supported with {found}; use one of them"


ACTIVATION_CHECKS = (_activations, _chunked_loss, _sequences)


def _unwritable(folder: Path) -> str | None:
    """Returns the reason why a folder is not writable, or `None`. Tries to write an unnamed file."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
