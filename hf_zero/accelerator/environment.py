"""Checks of the launcher's environment, and of settings that enable another engine for sharding."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hf_zero.errors import ConfigError


# Variables that a launcher such as torchrun sets together.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Settings of transformers and accelerate that enable another engine for sharding.
OTHER_SETTINGS = (
    "fsdp",
    "deepspeed",
    "parallelism_config",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
)

# Environment variables with which `accelerate launch` enables another engine for sharding.
OTHER_ENGINES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def refuse_other_engines(settings: Mapping[str, Any], *, prefix: str = "--") -> None:
    """Raises for settings and environment variables that enable another engine for sharding. `prefix` is prepended to
    names of settings in the message."""
    found = [f"{prefix}{name}" for name in OTHER_SETTINGS if settings.get(name)]
    found += [name for name in OTHER_ENGINES if _is_on(os.environ.get(name, ""))]
    if found:
        raise ConfigError(
            f"{found[0]}: cannot be combined with hf_zero, which does the sharding itself; remove it and use "
            f"{prefix}zero_stage (and {prefix}zero_sequence_parallel for long sequences)"
        )


def launched_ranks() -> int:
    """Returns the number of processes that the launcher has started. Raises [`ConfigError`] if its environment
    variables are incomplete."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE: {text!r} is not a number of processes; start with torchrun, which sets it")
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if int(text) > 1 and missing and not dist.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE is {text} but {', '.join(missing)} is not set; start with torchrun, which sets them together"
        )
    return int(text)


def refuse_other_world(launched: int, seen: int) -> None:
    """Raises if the size of the process group differs from the launcher's number of processes."""
    if launched != seen:
        raise ConfigError(
            f"WORLD_SIZE is {launched} but this process sees {seen} rank(s); start it with torchrun, which sets "
            "WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together"
        )


def _is_on(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")
