"""ZeRO-R: the inputs of checkpointed blocks at rest, divided over tensor-parallel ranks or in the host's memory."""

from hf_zero.activation.shard_model import checkpointing_of, shard, shard_with


__all__ = ["checkpointing_of", "shard", "shard_with"]
