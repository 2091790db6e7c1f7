"""`torch.compile` for sharded models: one graph for each kind of block; what is between blocks stays eager."""

import torch

from hf_zero.engine import direct
from hf_zero.engine.patch import ForwardGuard, Patch
from hf_zero.engine.sharded_model import Sharded, require_engine
from hf_zero.errors import LifecycleError, UnsupportedError


def compile_blocks(model: Sharded, **options) -> None:
    """Compiles the forward of every block, in place. The engine's hooks, the root and the model's own forward stay
    outside of the graphs; blocks of one kind share a graph. Called again with the same options, it does nothing.

    Gradient checkpointing works around the blocks and inside them. Weight gradients come out of the compiled backward
    and are then copied into the buffer that is reduced.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        options: of `torch.compile`, such as `backend`, `mode`, `fullgraph` and `dynamic`.

    Raises:
        `UnsupportedError`: for a model without blocks.
        `LifecycleError`: they are compiled already with other options.
    """
    engine = require_engine(model)
    if not engine.modules:
        raise UnsupportedError(
            f"{type(engine.model).__name__}: has no repeated blocks (ModuleList, Sequential), so there is nothing to "
            "compile; leave torch_compile out"
        )
    if engine.compiled_with == options:
        return
    if engine.compiled_with is not None:
        raise LifecycleError(
            f"the blocks are compiled already with {engine.compiled_with}; asked for {options}: use "
            "hf_zero.ShardedModel(model).unshard(), and shard the model anew"
        )
    engine.compiled_with = options
    for module in engine.modules.values():
        direct.uninstall(module)
        guard = module.forward
        if isinstance(guard, ForwardGuard):
            guard.forward = torch.compile(guard.forward, **options)
        else:
            engine.handles.append(Patch(module, "forward", torch.compile(module.forward, **options)))
