"""transformers' tensor parallelism combined with ZeRO, on a separate axis of ranks. In a trainer, the ranks of a
tensor-parallel group receive the same batch."""

import os

import torch.distributed as dist
from torch import nn
from transformers.distributed import DistributedConfig

from hf_zero.engine.divided import dividing_group
from hf_zero.errors import ConfigError, UnsupportedError


class TensorParallel(DistributedConfig):
    """Loads a model with tensor parallelism over groups of `tp_size` ranks; `hf_zero.shard` uses the other axis:
    `AutoModelForCausalLM.from_pretrained(name, distributed_config=hf_zero.TensorParallel(2))`.

    Each rank reads its own part of the files. The ranks of a group must receive the same batches.

    Args:
        tp_size (`int`): Number of neighboring ranks that form a tensor-parallel group. The model's own plan determines
            which parameters are split.

    Raises:
        `ConfigError`: If the number of ranks is not divisible by `tp_size`.
        `UnsupportedError`: If the installed transformers supports no second axis.
    """

    def __init__(self, tp_size: int):
        if not hasattr(DistributedConfig, "dp_size"):
            raise UnsupportedError(
                "TensorParallel: the installed transformers supports tensor parallelism only over all ranks; update it"
            )
        num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if tp_size < 1 or num_ranks % tp_size:
            raise ConfigError(
                f"tp_size: {num_ranks} ranks cannot form groups of {tp_size}; use a divisor of {num_ranks}"
            )
        super().__init__(tp_size=tp_size, fsdp_size=num_ranks // tp_size)

    @property
    def dp_size(self) -> int:
        """Always 1, so that transformers does not shard with FSDP along this axis."""
        return 1


def refuse_settings_of_divided(name: str, model: nn.Module, args) -> None:
    """Raises [`ConfigError`] for settings that tensor-parallel models do not support."""
    group = dividing_group(model)
    if group is None:
        if args.zero_partition_activations and name == "model":
            raise ConfigError(
                "zero_partition_activations: partitions activations over tensor-parallel ranks, but the model is not "
                "tensor-parallel; use zero_offload_activations, or load the model with "
                "distributed_config=hf_zero.TensorParallel(...)"
            )
        return
    if getattr(model, "tp_size", None) != dist.get_world_size(group):
        raise ConfigError(
            f"{name}: was split over tensor-parallel ranks by hand, so the trainer cannot know which ranks need the "
            "same batches; load it with from_pretrained(..., distributed_config=hf_zero.TensorParallel(...))"
        )
    others = {"zero_sequence_parallel": args.zero_sequence_parallel > 1}
    others["eval_use_gather_object"] = args.eval_use_gather_object
    if found := [setting for setting, is_set in others.items() if is_set]:
        raise ConfigError(
            f"{name}: is tensor-parallel, which is not supported with {found[0]}; remove it, or load the model "
            "without tensor parallelism"
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        raise ConfigError(
            "save_strategy: checkpoints of tensor-parallel models are not supported; use save_strategy='no', and save "
            "at the end: with hf_zero.gathered(model): model.save_pretrained(folder)"
        )
