"""The handle that users hold of a sharded model, what they do with it, and the functions that find its engine."""

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
# Settings that do not work with compiled blocks, and the values that turn them off.
_NOT_COMPILED = {"offload_activations": False, "partition_activations": False, "tiled_mlp": 1, "sequence_parallel": 1}


class ShardedModel(Uncopyable):
    """A handle of a model whose parameters, gradients or optimizer state are sharded over the data-parallel ranks.

    `hf_zero.shard` returns it. Of a model that something else has sharded, such as `ZeroTrainer` or `ZeroAccelerator`,
    `hf_zero.ShardedModel(model)` is the same. The functions of `hf_zero` that take a sharded model take this or the
    model itself.

    Args:
        model (`nn.Module`): a sharded model.

    Attributes:
        model (`nn.Module`): the model, which is called and trained as before.

    Raises:
        `LifecycleError`: when the model is not sharded; by each method, when it is not any more.
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
        """Makes all parameters whole as long as the context lasts, as `hf_zero.gathered(model)` does. That also takes
        parts of a model, and single parameters."""
        return gathered(self._engine.model, writeback)

    def full_grad(self, name: str) -> Tensor | None:
        """Returns the whole averaged gradient of one parameter on every rank. All ranks call it, after backward.

        Args:
            name (`str`): a name of `model.named_parameters()`.

        Returns:
            `Tensor`, in the parameter's shape, or `None` when it has had no gradient since the last step.

        Raises:
            `KeyError`: when no trainable parameter has this name.
            `LifecycleError`: on all ranks, when not all hold the gradients of the same backwards.
        """
        engine = self._engine
        gradient, index, what = _find_gradient(engine, name)
        if engine.has_broken_off:
            engine.drop_broken(alone=True)
        own = torch.tensor([gradient.used[index], engine.schedule.num_dropped])
        is_used, dropped = engine.comm.on_host.all_gather_vector(own).unbind(1)
        if (dropped != dropped[0]).any():
            raise LifecycleError(
                "full_grad: some ranks have dropped gradients that others hold; call zero_grad() on all ranks after "
                "an exception in a backward"
            )
        if not is_used.any():
            return None
        engine.finish_gradients()
        span = gradient.flat.layout.spans[index]
        grad = gradient.whole(what)[span.offset : span.stop].view(span.shape)
        return with_local(gradient.flat.params[index], grad)

    def reducing_this_backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Inside, the backward of `loss` is the last one before the optimizer's step. Stages 0 and 1 then reduce
        gradients while it runs, beside its computation, and not in the step. `ZeroTrainer` calls it; a loop of your
        own may, on all ranks alike. Stages 2 and 3 reduce in every backward anyway.

        Args:
            loss (`Tensor`): whose `backward()` is called inside; another backward before the step raises
                [`LifecycleError`].
        """
        return self._engine.reducing_this_backward(loss)

    def named_shards(self) -> Iterator[NamedShard]:
        """Yields the ranges of the masters for which this rank is responsible, each with `name`, `shape`, `start` and
        `tensor`. The ranges of all ranks cover every parameter exactly once. With several shard groups, other ranks
        hold them too: there they are to be read, and `gathered` is the way to write."""
        return self._engine.named_shards()

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Shows the floating-point parameters and buffers in another dtype, for evaluation without gradients. Masters
        and optimizer state stay as they are. All ranks enter the context together.

        Where the parameters rest whole (stages 0 to 2), the context holds a second copy of them in `dtype`; at stage 3
        one of the root and of the block under way.

        Args:
            dtype (`torch.dtype`): such as `torch.bfloat16`.

        Raises:
            `ConfigError`: for what is no floating-point dtype.
            `LifecycleError`: inside another one.
        """
        return _computing_in(self._engine, dtype)

    def memory(self) -> MemoryReport:
        """Measures the bytes that this rank holds now by tensor class, beside what DDP would hold. The state of the
        model's `ShardedOptimizer` counts from its first step on."""
        return measure(self._engine)

    def unshard(self) -> nn.Module:
        """Turns the model back into a plain module, whole on every rank, with its present values in the dtypes that it
        had before `hf_zero.shard`. All ranks call it.

        What had no master and was cast by `compute_dtype`, as frozen parameters are, comes back rounded. Gradients
        since the last step are dropped. Optimizers on this model can step no more.

        Returns:
            `nn.Module`: the model, which can be copied, pickled, or sharded again.

        Raises:
            `LifecycleError`: inside `hf_zero.gathered` or `computing_in`, or when someone wrote to a parameter whose
                data is away.
        """
        engine = self._engine
        engine.finish_updates()
        guards.refuse_held(engine, "unshard")
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


# [Note: other parameters] To show a model in another dtype, its modules are given other parameters for a while:
# autograd forgets the hooks on a parameter whose data changes its dtype.


@contextmanager
def _computing_in(engine: ZeroEngine, dtype: torch.dtype) -> Iterator[None]:
    if not is_floating_dtype(dtype):
        raise ConfigError(f"computing_in: {dtype!r} is not a floating dtype; give torch.bfloat16 or the like")
    if engine.is_cast:
        raise LifecycleError("computing_in inside computing_in: leave the outer one first")
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
    """Makes the parameters whole or placeholders, as their units say."""
    for unit in engine.units:
        for flat in unit.flats:
            flat.unshard() if unit.is_unsharded else flat.reshard()


def _restore(engine: ZeroEngine) -> None:
    """Removes everything that the engine put onto the model, and gives the parameters memory of their own. Each buffer
    is freed before the next is made whole."""
    engine.bus.wait_for_jobs()
    engine.bus.synchronize()  # no copy reads or writes what is given up, of which the hooks hold a part
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
    engine.blocks.clear()
    engine.reduction_order.clear()
    engine.modules.clear()
    engine.vocabulary.clear()
    engine.schedule.stacks.clear()


# What stands for a sharded model: itself, its handle, and within the package its engine.
Sharded: TypeAlias = nn.Module | ShardedModel | ZeroEngine


def engine_of(model: Sharded) -> ZeroEngine | None:
    """Returns the engine that holds a model's parameters, or `None` for a plain model. An engine is returned as it
    is."""
    if isinstance(model, nn.Module):
        return model.__dict__.get(ENGINE_ATTRIBUTE)
    return model._held if isinstance(model, ShardedModel) else model


def require_engine(model: Sharded) -> ZeroEngine:
    """Returns the engine of a model that must be sharded.

    Raises:
        `LifecycleError`: when it is not.
        `ConfigError`: when it is no model at all.
    """
    engine = engine_of(model)
    if engine is None:
        raise LifecycleError(f"{type(model).__name__}: is not sharded; call hf_zero.shard(model, stage=...) before")
    if not hasattr(engine, "comm"):
        found = f"{str(model)[:60]!r}: is of type {type(model).__name__}"
        raise ConfigError(f"{found}; give a sharded model, or what hf_zero.shard returned")
    return engine


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
    for name, default in _NOT_COMPILED.items():
        if getattr(engine.config, name) != default:
            raise UnsupportedError(f"{name}: does not work with compiled blocks; leave compilation or {name} out")
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
