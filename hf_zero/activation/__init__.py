"""ZeRO-R: the inputs of checkpointed blocks are divided over tensor-parallel ranks or rest in the host's memory."""

from hf_zero.activation.shard_model import checkpointing_of, shard, shard_with


__all__ = ["checkpointing_of", "shard", "shard_with"]
