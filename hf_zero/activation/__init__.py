"""Activations that take less memory: the inputs of checkpointed blocks are divided over tensor-parallel ranks or rest
in the host's memory (ZeRO-R), the loss of a language model is computed without all logits at once, and several ranks
share each sequence."""

from hf_zero.activation.sequence import refuse_group_size, refuse_undividable
from hf_zero.activation.shard_model import (
    checkpointing_of,
    chunked_loss_of,
    sequence_parallel_of,
    shard,
    shard_with,
)


__all__ = [
    "checkpointing_of",
    "chunked_loss_of",
    "refuse_group_size",
    "refuse_undividable",
    "sequence_parallel_of",
    "shard",
    "shard_with",
]
