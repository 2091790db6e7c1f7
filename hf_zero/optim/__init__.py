"""Optimizers over shards, gradient norms, and the loss scale."""

from hf_zero.optim.loss_scale import ZeroGradScaler, sharded_of
from hf_zero.optim.sharded import ShardedOptimizer, refuse_non_elementwise


__all__ = ["ShardedOptimizer", "ZeroGradScaler", "refuse_non_elementwise", "sharded_of"]
