"""Activations with less memory: checkpointed inputs that are partitioned over tensor-parallel ranks or offloaded to
the host (ZeRO-R), a loss that does not compute all logits at once, tiled MLPs, and sequence parallelism."""

from hf_zero.activation.sequence import SequenceParallel, refuse_group_size, refuse_undividable
from hf_zero.activation.shard_model import chunked_loss_of, shard, shard_with


__all__ = ["SequenceParallel", "chunked_loss_of", "refuse_group_size", "refuse_undividable", "shard", "shard_with"]
