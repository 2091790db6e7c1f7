"""`hf_zero.shard`: it builds the engine and decides where activations rest."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.activation.checkpointing import Checkpointing, refuse_without_switch
from hf_zero.activation.chunked_loss import ChunkedLoss, find_head
from hf_zero.activation.saved_tensors import SavedTensors
from hf_zero.activation.sequence import SequenceParallel, refuse_group_size, refuse_undividable
from hf_zero.activation.store import Division, Store
from hf_zero.activation.tiled_mlp import TiledMlp, refuse_untileable
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

# What `shard` takes by name, for messages.
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

    The model stays what it is: parameters keep identity, shape and device, and forward and backward are called as
    before. Where the ranks' parameters differ, rank 0's are taken. A model that is sharded already is left as it is.

    Args:
        model (`nn.Module`): any module with its data in place, or one of `hf_zero.load_pretrained`, of whose files
            every rank now reads its own ranges, or one that was built on the meta device, which is initialised: its
            values depend on rank 0's `torch.manual_seed` alone.
        stage (`int`): 0, 1, 2 or 3.
        compute_dtype (`torch.dtype`, *optional*): casts the parameters; trainable ones keep an fp32 master.
        device (`torch.device`, *optional*): where to train; by default where the first parameter is, and the CPU for a
            model whose values are all in files.
        group (`dist.ProcessGroup`, *optional*): the data-parallel ranks; by default the world.
        settings: further fields of `ZeroConfig`.

    Returns:
        [`ShardedModel`]: what optimizers and checkpoints take; the model itself is called as before.

    Raises:
        `ConfigError`: for a setting that is not valid, or that there is not, and for what is no module.
        `UnsupportedError`: for parameters that are not dense tensors in memory, and without data for those that no
            initialisation sets.
        `CheckpointError`: files of `load_pretrained` cannot be read any more, on any rank.
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
    """Shards as `shard` does, by settings that are a `ZeroConfig` already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard: {str(model)[:60]!r} is of type {type(model).__name__}; give a torch.nn.Module")
    if config.sequence_parallel > 1 and dist.is_initialized():
        refuse_group_size(config.sequence_parallel, dist.get_world_size(group))
    refuse_unsuited(model, config)
    is_new = engine_of(model) is None
    engine = build.shard_parameters(model, config, device=device, group=group)
    if is_new and config.packs_reductions and engine.comm.shared_memory is not None and engine.comm.rank == 0:
        logger.warning(
            "hf_zero: reduce_dtype %s changes nothing: all ranks share the memory of one host, where nothing is sent "
            "and sums are exact",
            config.reduce_dtype,
        )
    place_and_divide_activations(engine, partial(neighbours, engine.comm))
    return engine


def place_and_divide_activations(engine: ZeroEngine, connect: Callable[[int], Comm]) -> None:
    """Installs all that an engine's settings ask for of activations: where they rest, and how sequences, loss and MLPs
    are divided. What is there already stays.

    Args:
        engine (`ZeroEngine`): of a trained or a frozen model.
        connect (`Callable`): connects so many neighbouring ranks, which share sequences.
    """
    config = engine.config
    if (config.partition_activations or config.offload_activations) and Checkpointing.of(engine) is None:
        store = _make_store(engine)
        engine.handles.append(Checkpointing(engine, store))
        if not config.partition_activations:
            engine.handles.append(SavedTensors(engine, store))
    if config.sequence_parallel > 1 and SequenceParallel.of(engine) is None:
        refuse_group_size(config.sequence_parallel, engine.comm.num_ranks)
        engine.handles.append(SequenceParallel(engine, connect(config.sequence_parallel)))
    head = find_head(engine.model) if config.chunked_loss != "off" else None
    if head is not None and ChunkedLoss.of(engine) is None:
        engine.handles.append(ChunkedLoss(engine, *head, is_auto=config.chunked_loss == "auto"))
    if config.tiled_mlp != 1 and TiledMlp.of(engine) is None:
        engine.handles.append(TiledMlp(engine, config.tiled_mlp))


def refuse_unsuited(model: nn.Module, config: ZeroConfig) -> None:
    """Refuses a model whose activations cannot be moved, or whose loss, MLPs or sequences cannot be divided, as the
    settings ask for.

    Args:
        model (`nn.Module`): sharded or not. Of one that is sharded, blocks, MLPs and attention are not asked again.

    Raises:
        `ConfigError`: no parameter is divided over tensor-parallel ranks, whose activations could be.
    """
    if config.partition_activations or config.offload_activations:
        _refuse_kept(model, config)
    if config.chunked_loss == "on" and find_head(model) is None:
        raise UnsupportedError(
            f"chunked_loss: {type(model).__name__} has no head that is one plain linear layer, from whose weight the "
            "loss could be computed (an adapter, quantization or division of it counts too); leave chunked_loss out"
        )
    if config.tiled_mlp != 1 and engine_of(model) is None:
        refuse_untileable(model)
    if config.sequence_parallel > 1 and engine_of(model) is None:
        refuse_undividable(model, config.sequence_parallel)


def sequence_parallel_of(engine: ZeroEngine) -> SequenceParallel | None:
    """Returns what divides the sequences of an engine's model; `None` where each rank has whole ones."""
    return SequenceParallel.of(engine)


def chunked_loss_of(model: nn.Module) -> ChunkedLoss | None:
    """Returns what computes a sharded model's loss for a part of the vocabulary at a time; `None` where nothing
    does."""
    engine = engine_of(model)
    return None if engine is None else ChunkedLoss.of(engine)


def checkpointing_of(engine: ZeroEngine) -> Checkpointing | None:
    """Returns the engine's hooks for the inputs of checkpointed blocks; `None` where torch keeps the inputs."""
    return Checkpointing.of(engine)


def _make_store(engine: ZeroEngine) -> Store:
    config, counters = engine.config, engine.comm.counters
    bus = engine.bus if config.offload_activations else None
    parts = engine.divided_over if config.partition_activations else None
    return Store(bus, Division(parts, counters) if parts is not None else None)


def _refuse_kept(model: nn.Module, config: ZeroConfig) -> None:
    """Refuses a trained model whose activations cannot be moved as the settings ask for."""
    if not any(param.requires_grad for param in model.parameters()):
        return
    if config.partition_activations:
        refuse_without_switch(model)
        if not any(is_divided(param) for param in model.parameters()):
            raise ConfigError(
                "partition_activations: divides what tensor-parallel ranks hold several times, and no parameter of "
                f"{type(model).__name__} is divided over such ranks; use offload_activations, or load the model with "
                "transformers' tensor parallelism"
            )
    elif engine_of(model) is None and not partition(model).stacks:
        raise UnsupportedError(
            f"offload_activations: {type(model).__name__} has no repeated blocks (ModuleList, Sequential), in which "
            "activations are told apart; leave it out"
        )
