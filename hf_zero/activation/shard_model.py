"""`hf_zero.shard`: builds the engine and sets up the activation features."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.activation.chunked_loss import ChunkedLoss, find_head
from hf_zero.activation.offload import Offload
from hf_zero.activation.partition import Division
from hf_zero.activation.sequence import SequenceParallel, refuse_group_size, refuse_undividable
from hf_zero.activation.tiled_mlp import TiledMlp, find_mlps
from hf_zero.comm import Comm
from hf_zero.comm.world import neighbours
from hf_zero.config import ZeroConfig, ZeroSettings, choose
from hf_zero.engine import ShardedModel, build, engine_of
from hf_zero.engine.divided import is_divided
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.partition import partition
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.removed import refuse_removed


logger = logging.getLogger(__name__)

# Keyword arguments of `shard`, for messages.
_NAMES = dict.fromkeys(("stage", "compute_dtype", "device", "group", *ZeroSettings.__annotations__))


def shard(
    model: nn.Module,
    *,
    stage: int = 3,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    **settings: Unpack[ZeroSettings],
) -> ShardedModel:
    """Partitions a model over the data-parallel ranks, in place (ZeRO, arXiv 1910.02054).

    Parameters keep their identity, shape and device, and forward and backward are called as before. If the ranks'
    parameters differ, those of rank 0 are used. A model that is already sharded is not changed.

    Args:
        model (`nn.Module`): A module with initialized parameters, a model of `hf_zero.load_pretrained`, or a module on
            the meta device. If it is a model of `load_pretrained`, each rank reads its own part of the weight files
            during this call. A module on the meta device is initialized; its values depend only on
            `torch.manual_seed` of rank 0.
        stage (`int`): 0, 1, 2 or 3.
        compute_dtype (`torch.dtype`, *optional*): Dtype to cast the parameters to. Trainable parameters keep an fp32
            master copy.
        device (`torch.device`, *optional*): Device to train on. Defaults to the device of the first parameter, and to
            the CPU if all values are still in files.
        group (`dist.ProcessGroup`, *optional*): The data-parallel ranks. Defaults to the world.
        settings: Other fields of `ZeroConfig`.

    Returns:
        [`ShardedModel`]: A handle for optimizers and checkpoints. The model itself is called as before.

    Raises:
        `ConfigError`: If a setting is invalid or unknown, or `model` is not a module.
        `UnsupportedError`: If a parameter is not a dense tensor, or is on the meta device and no initialization sets
            it.
        `CheckpointError`: If the files of `load_pretrained` can no longer be read on some rank.
    """
    refuse_removed(settings, "zero_")
    for name in settings:
        choose("shard", name, _NAMES)
    config = ZeroConfig(stage=stage, compute_dtype=compute_dtype, **settings)
    shard_with(model, config, device=device, group=group)
    return ShardedModel(model)


def shard_with(
    model: nn.Module,
    config: ZeroConfig,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> ZeroEngine:
    """Shards a model like `shard`, with the settings of a `ZeroConfig`."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard: {str(model)[:60]!r} is of type {type(model).__name__}; expected a torch.nn.Module")
    if config.sequence_parallel > 1 and dist.is_initialized():
        refuse_group_size(config.sequence_parallel, dist.get_world_size(group))
    refuse_unsuited(model, config)
    is_new = engine_of(model) is None
    engine = build.shard_parameters(model, config, device=device, group=group)
    if is_new and config.packs_reductions and engine.comm.shared_memory is not None and engine.comm.rank == 0:
        logger.warning(
            "hf_zero: reduce_dtype %s has no effect: ranks share memory on one host, so nothing is sent and sums are "
            "exact",
            config.reduce_dtype,
        )
    place_and_divide_activations(engine, partial(neighbours, engine.comm))
    return engine


def place_and_divide_activations(engine: ZeroEngine, connect: Callable[[int], Comm]) -> None:
    """Installs the activation features of an engine's settings, unless they are already installed: offload and
    partitioning, sequence parallelism, the chunked loss and tiled MLPs.

    Args:
        engine (`ZeroEngine`): The engine of a trained or frozen model.
        connect (`Callable`): Returns the communicator of the given number of neighboring ranks, which share sequences.
    """
    config = engine.config
    if (config.partition_activations or config.offload_activations) and Offload.of(engine) is None:
        over = engine.divided_over if config.partition_activations else None
        division = None if over is None else Division(over, engine.comm.counters)
        engine.handles.append(Offload(engine, engine.bus if config.offload_activations else None, division))
    if config.sequence_parallel > 1 and SequenceParallel.of(engine) is None:
        refuse_group_size(config.sequence_parallel, engine.comm.num_ranks)
        engine.handles.append(SequenceParallel(engine, connect(config.sequence_parallel)))
    head = find_head(engine.model) if config.chunked_loss != "off" else None
    if head is not None and ChunkedLoss.of(engine) is None:
        engine.handles.append(ChunkedLoss(engine, *head, is_auto=config.chunked_loss == "auto"))
    if config.tiled_mlp != 1 and TiledMlp.of(engine) is None:
        engine.handles.append(TiledMlp(engine, config.tiled_mlp))


def refuse_unsuited(model: nn.Module, config: ZeroConfig) -> None:
    """Raises for a model that does not support the activation features of the settings.

    Args:
        model (`nn.Module`): A sharded or unsharded model. Blocks, MLPs and attention of a sharded model are not
            checked again.
        config (`ZeroConfig`): The settings.

    Raises:
        `UnsupportedError`: If the model does not support a setting.
        `ConfigError`: If `partition_activations` is set for a model that is not tensor-parallel.
    """
    if config.partition_activations or config.offload_activations:
        _refuse_kept(model, config)
    if config.chunked_loss == "on" and find_head(model) is None:
        raise UnsupportedError(
            f"chunked_loss: {type(model).__name__} has no head that is a single plain linear layer, without adapter, "
            "quantization or tensor parallelism; remove chunked_loss"
        )
    if config.tiled_mlp != 1 and engine_of(model) is None and not find_mlps(model):
        raise UnsupportedError(
            f"tiled_mlp: no block of {type(model).__name__} has an MLP that takes one tensor and whose class name "
            "ends in MLP, FFN or FeedForward; remove tiled_mlp"
        )
    if config.sequence_parallel > 1 and engine_of(model) is None:
        refuse_undividable(model, config.sequence_parallel)


def chunked_loss_of(model: nn.Module) -> ChunkedLoss | None:
    """Returns the chunked loss of a model, or `None` if it has none or is not sharded."""
    engine = engine_of(model)
    return None if engine is None else ChunkedLoss.of(engine)


def _refuse_kept(model: nn.Module, config: ZeroConfig) -> None:
    """Raises for a trained model that does not support the settings for offload or partitioning of activations."""
    if not any(param.requires_grad for param in model.parameters()):
        return
    if config.partition_activations:
        if not any(is_divided(param) for param in model.parameters()):
            raise ConfigError(
                "partition_activations: partitions activations over tensor-parallel ranks, but "
                f"{type(model).__name__} is not tensor-parallel; use offload_activations, or load the model with "
                "transformers' tensor parallelism"
            )
    elif engine_of(model) is None and not partition(model).stacks:
        raise UnsupportedError(
            f"offload_activations: {type(model).__name__} has no repeated blocks (ModuleList, Sequential); remove it"
        )
