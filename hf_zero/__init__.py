"""Train Hugging Face models with ZeRO: optimizer state, gradients and parameters partitioned over the ranks."""

from hf_zero.engine import ZeroEngine, engine_of, gathered, shard
from hf_zero.optim import ShardedOptimizer, ZeroGradScaler


__version__ = "0.1.0"

__all__ = ["ShardedOptimizer", "ZeroEngine", "ZeroGradScaler", "engine_of", "gathered", "shard"]
