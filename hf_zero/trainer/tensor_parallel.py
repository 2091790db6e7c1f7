"""Models that transformers has divided over tensor-parallel ranks. In a trainer the ranks of one group get the same
batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_zero.engine.divided import dividing_group
from hf_zero.errors import ConfigError


def refuse_settings_of_divided(name: str, model: nn.Module, args) -> None:
    """Refuses settings that do not go with a model that tensor-parallel ranks divide."""
    group = dividing_group(model)
    if group is None:
        if args.zero_partition_activations and name == "model":
            raise ConfigError(
                "zero_partition_activations: divides what tensor-parallel ranks hold several times, and the model is "
                "not divided over such ranks; use zero_offload_activations, or load the model with "
                "distributed_config=hf_zero.TensorParallel(...)"
            )
        return
    if getattr(model, "tp_size", None) != dist.get_world_size(group):
        raise ConfigError(
            f"{name}: is divided over tensor-parallel ranks by hand, so the trainer cannot know which ranks see the "
            "same data; load it with from_pretrained(..., distributed_config=hf_zero.TensorParallel(...))"
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        raise ConfigError(
            "save_strategy: checkpoints of a model that is divided over tensor-parallel ranks are not written; use "
            "save_strategy='no', and save at the end: with hf_zero.gathered(model): model.save_pretrained(folder)"
        )


@contextmanager
def apart(model: nn.Module | None) -> Iterator[None]:
    """Hides from accelerate that a model is divided already, since it would expect FSDP along the other axis."""
    tp_size = getattr(model, "_tp_size", None)
    if model is None or tp_size is None:
        yield
        return
    model._tp_size = None
    try:
        yield
    finally:
        model._tp_size = tp_size


def arrange(accelerator: Accelerator, model: nn.Module | None) -> None:
    """Tells an accelerator which ranks see the same data."""
    tp_size = getattr(model, "_tp_size", None) or 1
    if tp_size > 1:
        shape = (accelerator.num_processes // tp_size, tp_size)
        accelerator.state.device_mesh = init_device_mesh(
            accelerator.device.type, shape, mesh_dim_names=("dp_shard", "tp")
        )
