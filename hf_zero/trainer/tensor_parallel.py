"""transformers' tensor parallelism beside ZeRO, on a separate axis of ranks. In a trainer the ranks of one group get
the same batch."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from transformers.distributed import DistributedConfig

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.compat import replaced
from hf_zero.engine.divided import dividing_group
from hf_zero.errors import ConfigError, UnsupportedError


class TensorParallel(DistributedConfig):
    """Divides a model over groups of `tp_size` ranks when it is loaded, and leaves the other axis to `hf_zero.shard`:
    `AutoModelForCausalLM.from_pretrained(name, distributed_config=hf_zero.TensorParallel(2))`.

    Each rank reads its own part of the files. Ranks of one group must be given the same batches.

    Args:
        tp_size (`int`): over how many ranks each divided parameter goes, by the model's own plan; neighbouring ranks
            form a group.

    Raises:
        `ConfigError`: when the ranks do not come out even.
        `UnsupportedError`: when the installed transformers cannot leave the other axis.
    """

    def __init__(self, tp_size: int):
        if not hasattr(DistributedConfig, "dp_size"):
            raise UnsupportedError("TensorParallel: this version of transformers divides over all ranks; update it")
        num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if tp_size < 1 or num_ranks % tp_size:
            raise ConfigError(f"tp_size: {num_ranks} ranks cannot form groups of {tp_size}; give a divisor of it")
        super().__init__(tp_size=tp_size, fsdp_size=num_ranks // tp_size)

    @property
    def dp_size(self) -> int:
        """Always 1, so that transformers does not shard with FSDP along this axis."""
        return 1


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
    others = {"zero_sequence_parallel": args.zero_sequence_parallel > 1}
    others["eval_use_gather_object"] = args.eval_use_gather_object
    if found := [setting for setting, is_set in others.items() if is_set]:
        raise ConfigError(
            f"{name}: is divided over tensor-parallel ranks, which are given the same batches, and whose rows count "
            f"once; leave {found[0]} out, or load the model without tensor parallelism"
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        raise ConfigError(
            "save_strategy: checkpoints of a model that is divided over tensor-parallel ranks are not written; use "
            "save_strategy='no', and save at the end: with hf_zero.gathered(model): model.save_pretrained(folder)"
        )


def apart(model: nn.Module | None) -> AbstractContextManager:
    """Hides from accelerate that a model is divided already, since it would expect FSDP along the other axis."""
    is_divided = getattr(model, "_tp_size", None) is not None
    return replaced(model, _tp_size=None) if is_divided else nullcontext()


def arrange(accelerator: ZeroAccelerator, model: nn.Module | None) -> None:
    """Tells an accelerator which ranks see the same data."""
    tp_size = getattr(model, "_tp_size", None) or 1
    if tp_size > 1:
        accelerator.give_neighbours_same(tp_size, "tp")
