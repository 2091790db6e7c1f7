"""The keyword arguments of `ZeroAccelerator`, and checks of the launcher's environment."""

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DataLoaderConfiguration,
    DynamoBackend,
    GradientAccumulationPlugin,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)

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


class ZeroAcceleratorSettings(TypedDict, total=False):
    """For editors and type checkers: the arguments of `Accelerator`, except those of other sharding engines, and the
    fields of `ZeroConfig` with the prefix `zero_`."""

    device_placement: bool
    split_batches: bool
    mixed_precision: PrecisionType | str | None
    gradient_accumulation_steps: int
    cpu: bool
    dataloader_config: DataLoaderConfiguration | None
    rng_types: list[str | RNGType] | None
    log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None
    project_dir: str | os.PathLike | None
    project_config: ProjectConfiguration | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    step_scheduler_with_optimizer: bool
    kwargs_handlers: list[KwargsHandler] | None
    dynamo_backend: DynamoBackend | str | None
    dynamo_plugin: TorchDynamoPlugin | None

    zero_compute_dtype: torch.dtype | None
    zero_reduce_dtype: torch.dtype
    zero_gather_dtype: torch.dtype | None
    zero_bucket_nbytes: int | str
    zero_prefetch_units: int
    zero_keep_gathered: int | str
    zero_timeout_seconds: float | None
    zero_shared_memory: bool
    zero_shard_size: int | str | None
    zero_offload: str
    zero_offload_fraction: float
    zero_offload_dir: str | None
    zero_partition_activations: bool
    zero_offload_activations: bool
    zero_chunked_loss: str
    zero_tiled_mlp: int | str
    zero_sequence_parallel: int
    zero_nonfinite: str
    zero_strict: bool


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
