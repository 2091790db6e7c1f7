"""Activations that take less memory: the inputs of checkpointed blocks are divided over tensor-parallel ranks or rest
in the host's memory (ZeRO-R), and the loss of a language model is computed without all logits at once."""

from hf_zero.activation.shard_model import checkpointing_of, chunked_loss_of, shard, shard_with


__all__ = ["checkpointing_of", "chunked_loss_of", "shard", "shard_with"]
