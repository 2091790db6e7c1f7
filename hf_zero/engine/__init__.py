"""The sharding engine: partition, units, hooks. It takes any `nn.Module`."""

from hf_zero.engine.access import gathered
from hf_zero.engine.build import engine_of, shard_with
from hf_zero.engine.compilation import compile_blocks
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard, ParamInfo
from hf_zero.engine.source import has_sources, materialize, placeholders


__all__ = [
    "NamedShard",
    "ParamInfo",
    "ZeroEngine",
    "compile_blocks",
    "engine_of",
    "gathered",
    "has_sources",
    "materialize",
    "placeholders",
    "shard_with",
]
