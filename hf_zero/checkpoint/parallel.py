"""transformers' tensor parallelism beside ZeRO, on a separate axis of ranks."""

import os

import torch.distributed as dist
from transformers.distributed import DistributedConfig

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
