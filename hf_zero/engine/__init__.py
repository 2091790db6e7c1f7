"""The sharding engine: partition, units and hooks for any `nn.Module`."""

from hf_zero.engine.access import gathered
from hf_zero.engine.build import shard_parameters
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard, ParamInfo
from hf_zero.engine.memory import MemoryReport
from hf_zero.engine.sharded_model import Sharded, ShardedModel, compile_blocks, engine_of, require_engine
from hf_zero.engine.source import has_sources, materialize, placeholders


__all__ = [
    "MemoryReport",
    "NamedShard",
    "ParamInfo",
    "Sharded",
    "ShardedModel",
    "ZeroEngine",
    "compile_blocks",
    "engine_of",
    "gathered",
    "has_sources",
    "materialize",
    "placeholders",
    "require_engine",
    "shard_parameters",
]
