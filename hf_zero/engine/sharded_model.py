"""`ShardedModel`, the user's handle to a sharded model, and functions that find the engine of a model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hf_zero.config import is_floating_dtype
from hf_zero.engine import direct, guards
from hf_zero.engine.access import forget, gathered, remember
from hf_zero.engine.divided import with_local
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.memory import MemoryReport, measure
from hf_zero.engine.opaque import is_opaque
from hf_zero.engine.patch import ForwardGuard, Patch, Uncopyable
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError


ENGINE_ATTRIBUTE = "_hf_zero_engine"
# Settings that are incompatible with compiled blocks, and the values that disable them.
_NOT_COMPILED = {"offload_activations": False, "partition_activations": False, "tiled_mlp": 1, "sequence_parallel": 1}


class ShardedModel(Uncopyable):
    """A handle to a model whose parameters, gradients or optimizer state are sharded over the data-parallel ranks.

    `hf_zero.shard` returns a `ShardedModel`. If `ZeroTrainer` or `ZeroAccelerator` sharded the model, create the
    handle with `hf_zero.ShardedModel(model)`. Functions of `hf_zero` that expect a sharded model accept the handle or
    the model.

    Args:
        model (`nn.Module`): a sharded model.

    Attributes:
        model (`nn.Module`): the model. Call and train it as before.

    Raises:
        `LifecycleError`: if the model is not sharded. Methods raise it after `unshard`.
    """

    def __init__(self, model: nn.Module):
        self._held = require_engine(model)
        self.model: nn.Module = self._held.model

    @property
    def _engine(self) -> ZeroEngine:
        if not self._held.handles:
            raise LifecycleError("the model was unsharded; shard it again")
        return self._held

    def gathered(self, writeback: bool = False) -> AbstractContextManager[None]:
        """Gathers all parameters inside the context, like `hf_zero.gathered(model)`, which also accepts submodules and
        parameters."""
        return gathered(self._engine.model, writeback)

    def full_grad(self, name: str) -> Tensor | None:
        """Returns the full averaged gradient of a parameter on every rank. All ranks must call it, after backward.

        Args:
            name (`str`): a name in `model.named_parameters()`.

        Returns:
            `Tensor`: the gradient in the shape of the parameter, or `None` if it has had no gradient since the last
                step.

        Raises:
            `KeyError`: if no trainable parameter has this name.
            `LifecycleError`: on all ranks, if some ranks have dropped gradients.
        """
        engine = self._engine
        gradient, index, what = _find_gradient(engine, name)
        engine.vote()
        has_any = engine.schedule.num_backwards > engine.schedule.num_dropped
        if not (has_any and gradient.used[index]):
            return None
        engine.finish_gradients()
        span = gradient.flat.layout.spans[index]
        grad = gradient.whole(what)[span.offset : span.stop].view(span.shape)
        return with_local(gradient.flat.params[index], grad)

    def reducing_this_backward(self, loss: Tensor, reduces: bool = True) -> AbstractContextManager[None]:
        """Declares whether the backward inside the context is the last one before the optimizer step, on all ranks.
        Stages 0 and 1 then reduce gradients during the last backward instead of in the step. Stages 2 and 3 reduce in
        every backward anyway. `ZeroTrainer` uses this context for the last backward.

        Args:
            loss (`Tensor`): call its `backward()` inside the context.
            reduces (`bool`): `True`: it is the last one, and another backward before the step raises
                [`LifecycleError`]. `False`: another one follows. In half precision, stages 0 and 1 otherwise reduce in
                every backward; now each rank adds the gradients in the dtype of the sum and reduces them once. This
                takes 4 bytes per parameter in fp32 until then. With offload it has no effect.
        """
        return self._engine.reducing_this_backward(loss, reduces)

    def named_shards(self) -> Iterator[NamedShard]:
        """Yields the ranges of the masters that this rank saves, each with `name`, `shape`, `start` and `tensor`. The
        ranges of all ranks cover every parameter exactly once. With several shard groups, other ranks hold copies of
        the same values, so treat the ranges as read-only and write inside `gathered(writeback=True)`."""
        return self._engine.named_shards()

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Casts floating-point parameters and buffers to another dtype inside the context, for evaluation without
        gradients. Masters and optimizer state do not change. All ranks must enter the context together.

        At stages 0 to 2, the context holds a second copy of all parameters in `dtype`; at stage 3, a copy of the root
        and of the block that is running.

        Args:
            dtype (`torch.dtype`): for example `torch.bfloat16`.

        Raises:
            `ConfigError`: if `dtype` is not a floating-point dtype.
            `LifecycleError`: inside another `computing_in`.
        """
        return _computing_in(self._engine, dtype)

    def memory(self) -> MemoryReport:
        """Measures the memory that this rank uses now by class of tensors, and what DDP would use. Optimizer state is
        included after the first step of the model's `ShardedOptimizer`."""
        return measure(self._engine)

    def unshard(self) -> nn.Module:
        """Turns the model back into a plain module with full parameters on every rank, which have their current values
        and the dtypes from before `hf_zero.shard`. All ranks must call it.

        Parameters without masters that `compute_dtype` cast, such as frozen ones, keep their rounded values. Gradients
        since the last step are dropped, and existing optimizers can no longer step.

        Returns:
            `nn.Module`: the model. It can be copied, pickled, or sharded again.

        Raises:
            `LifecycleError`: inside `hf_zero.gathered` or `computing_in`, or if user code wrote to a parameter while
                it was sharded.
        """
        engine = self._engine
        engine.finish_updates()
        guards.refuse_in_context(engine, "unshard")
        guards.take_here(engine, engine.flats)
        engine.clear_gradients()
        _restore(engine)
        return self.model


def _find_gradient(engine: ZeroEngine, name: str) -> tuple[Gradient, int, str]:
    for unit in engine.units:
        for gradient in unit.gradients:
            for index, info in enumerate(gradient.flat.infos):
                if info.name == name:
                    return gradient, index, unit.name
    raise KeyError(f"{name}: no trainable parameter has this name")


# [Note: other parameters] `computing_in` puts other parameters into the modules instead of changing the dtype of
# `param.data`, because autograd then drops the hooks on a parameter.


@contextmanager
def _computing_in(engine: ZeroEngine, dtype: torch.dtype) -> Iterator[None]:
    if not is_floating_dtype(dtype):
        raise ConfigError(f"computing_in: {dtype!r} is not a floating dtype; use for example torch.bfloat16")
    if engine.is_cast:
        raise LifecycleError("computing_in: cannot be nested; exit the outer context first")
    modules = list(engine.model.modules())
    tensors = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    flats = [flat for flat in engine.flats if flat.dtype.is_floating_point]
    flats = [flat for flat in flats if not any(is_opaque(p) for p in flat.params)]
    own = [(flat, flat.params, flat.placeholders, flat.versions) for flat in flats]
    try:
        shown = {}
        for flat, params, *_ in own:
            flat.cast = dtype
            flat.placeholders = [engine.placeholders.of(info.shape, dtype) for info in flat.infos]
            flat.params = [_shown(p, away) for p, away in zip(params, flat.placeholders)]
            shown.update({id(p): other for p, other in zip(params, flat.params)})
        for module, named, buffers in tensors:
            module._parameters.update({name: shown.get(id(p), p) for name, p in named.items()})
            floating = {name: b for name, b in buffers.items() if b is not None and b.is_floating_point()}
            module._buffers.update({name: buffer.to(dtype) for name, buffer in floating.items()})
        remember(engine.units)
        _show(engine)
        with torch.no_grad():
            yield
    finally:
        for flat, params, placeholders, versions in own:
            flat.cast, flat.params, flat.placeholders, flat.versions = None, params, placeholders, versions
        for module, named, buffers in tensors:
            module._parameters.update(named)
            module._buffers.update(buffers)
        _show(engine)


def _shown(param: nn.Parameter, away: Tensor) -> nn.Parameter:
    return nn.Parameter(with_local(param, away), requires_grad=False)


def _show(engine: ZeroEngine) -> None:
    """Shows gathered values in the parameters of units that are unsharded, and placeholders in the others."""
    for unit in engine.units:
        for flat in unit.flats:
            flat.unshard() if unit.is_unsharded else flat.reshard()


def _restore(engine: ZeroEngine) -> None:
    """Removes everything that the engine installed on the model, and copies the parameters into separate memory. Each
    flat buffer is freed before the next one is gathered."""
    engine.bus.wait_for_jobs()
    engine.bus.synchronize()  # no pending copy may use the memory that is freed below, some of it with the hooks
    while engine.handles:
        engine.handles.pop().remove()
    forget(engine.units)
    engine.disk = None
    for unit in engine.units:
        unit.wait_for_all_gather()
        for flat in unit.flats:
            flat.restore_params(unit.name)
        unit.slot = unit.gradient_slots = unit.disk_prefetcher = None
        for gradient in unit.gradients:
            gradient.give_up()
    engine.refuse_new_members = None
    engine.units.clear()
    engine.gradients.clear()
    engine.blocks.clear()
    engine.reduction_order.clear()
    engine.modules.clear()
    engine.vocabulary.clear()
    engine.schedule.stacks.clear()


# A sharded model, its handle, or, inside the package, its engine.
Sharded: TypeAlias = nn.Module | ShardedModel | ZeroEngine


def engine_of(model: Sharded) -> ZeroEngine | None:
    """Returns the engine of a sharded model, or `None` for a plain model. An engine is returned unchanged."""
    if isinstance(model, nn.Module):
        return model.__dict__.get(ENGINE_ATTRIBUTE)
    return model._held if isinstance(model, ShardedModel) else model


def require_engine(model: Sharded) -> ZeroEngine:
    """Returns the engine of a sharded model.

    Raises:
        `LifecycleError`: if the model is not sharded.
        `ConfigError`: if `model` is not a model.
    """
    engine = engine_of(model)
    if engine is None:
        raise LifecycleError(f"{type(model).__name__}: is not sharded; call hf_zero.shard(model, stage=...) first")
    if not hasattr(engine, "comm"):
        found = f"{str(model)[:60]!r}: is of type {type(model).__name__}"
        raise ConfigError(f"{found}; pass a sharded model, or the result of hf_zero.shard")
    return engine


def compile_blocks(model: Sharded, **options) -> None:
    """Compiles the forward of every block, in place. The engine's hooks, the root and the model's own forward stay
    outside of the graphs. Blocks of one class share a graph. A second call with the same options does nothing.

    Gradient checkpointing works both around and inside the blocks. Weight gradients are outputs of the compiled
    backward and are copied into the reduce buffer.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        options: keyword arguments for `torch.compile`, such as `backend`, `mode`, `fullgraph` and `dynamic`.

    Raises:
        `UnsupportedError`: if the model has no blocks, or a setting is incompatible with compiled blocks.
        `LifecycleError`: if the blocks are already compiled with other options.
    """
    engine = require_engine(model)
    if not engine.modules:
        raise UnsupportedError(
            f"{type(engine.model).__name__}: has no repeated blocks (ModuleList, Sequential), so there is nothing to "
            "compile; remove torch_compile"
        )
    for name, default in _NOT_COMPILED.items():
        if getattr(engine.config, name) != default:
            raise UnsupportedError(f"{name}: does not work with compiled blocks; remove {name} or compilation")
    if engine.compiled_with == options:
        return
    if engine.compiled_with is not None:
        raise LifecycleError(
            f"the blocks are already compiled with {engine.compiled_with}, but got {options}; call "
            "hf_zero.ShardedModel(model).unshard() and shard the model again"
        )
    engine.compiled_with = options
    for module in engine.modules.values():
        direct.uninstall(module)
        guard = module.forward
        if isinstance(guard, ForwardGuard):
            guard.forward = torch.compile(guard.forward, **options)
        else:
            engine.handles.append(Patch(module, "forward", torch.compile(module.forward, **options)))
