"""Sharded optimizers, gradient norms and the loss scale."""

from hf_zero.optim.combined import CombinedOptimizer, MuonWithAdamW
from hf_zero.optim.granularity import granularity_of, inner_optimizers, refuse_unknown
from hf_zero.optim.loss_scale import ZeroGradScaler, sharded_of
from hf_zero.optim.sharded import ShardedOptimizer


__all__ = [
    "CombinedOptimizer",
    "MuonWithAdamW",
    "ShardedOptimizer",
    "ZeroGradScaler",
    "granularity_of",
    "inner_optimizers",
    "refuse_unknown",
    "sharded_of",
]
