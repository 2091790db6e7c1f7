"""Checks of the environment in which a launcher has started this process."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hf_zero.errors import ConfigError


# What a launcher such as torchrun sets, all together.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Settings of transformers and accelerate that ask for another way to shard.
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

# Environment variables by which `accelerate launch` turns on another way to shard.
OTHER_ENGINES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def refuse_other_engines(settings: Mapping[str, Any], *, prefix: str = "--") -> None:
    """Refuses settings and environment variables that ask for another way to shard. `prefix` stands before the name of
    a setting in the message."""
    found = [f"{prefix}{name}" for name in OTHER_SETTINGS if settings.get(name)]
    found += [name for name in OTHER_ENGINES if _is_on(os.environ.get(name, ""))]
    if found:
        raise ConfigError(
            f"{found[0]}: found beside hf_zero, which shards by itself; remove it and use {prefix}zero_stage"
        )


def launched_ranks() -> int:
    """Returns how many processes the launcher has started. Raises [`ConfigError`] when the environment that it should
    have set is not complete."""
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
    """Refuses a process group whose size is not that of the launcher."""
    if launched != seen:
        raise ConfigError(
            f"WORLD_SIZE is {launched} but this process sees {seen} rank(s); start it with torchrun, which sets "
            "WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together"
        )


def _is_on(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")
