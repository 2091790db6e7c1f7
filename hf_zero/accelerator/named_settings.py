"""The named settings of `ZeroAccelerator`, for editors and type checkers."""

import os
from typing import TypedDict

import torch
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


class ZeroAcceleratorSettings(TypedDict, total=False):
    """The settings of `Accelerator`, without those for other ways to shard, and the settings of `ZeroConfig` with the
    prefix `zero_`."""

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
    zero_separate_reductions: bool
    zero_shard_size: int | str | None
    zero_secondary_shard: bool
    zero_offload: str
    zero_offload_fraction: float
    zero_offload_dir: str | None
    zero_delayed_update: int
    zero_partition_activations: bool
    zero_offload_activations: bool
    zero_chunked_loss: str
    zero_tiled_mlp: int | str
    zero_sequence_parallel: int
    zero_nonfinite: str
    zero_strict: bool
