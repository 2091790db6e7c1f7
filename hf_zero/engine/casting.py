"""Shows the parameters of a sharded model in another dtype for a while, and refuses to change the dtype for good."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hf_zero.config import is_floating_dtype
from hf_zero.engine.access import remember
from hf_zero.engine.divided import with_local
from hf_zero.engine.model_units import ModelUnits
from hf_zero.engine.opaque import is_opaque
from hf_zero.engine.partition import is_on
from hf_zero.engine.patch import Patch
from hf_zero.errors import ConfigError, LifecycleError


PLAIN_AGAIN = "do it before it is sharded, or after hf_zero.ShardedModel(model).unshard()"


def guard(engine: ModelUnits) -> None:
    """Refuses calls that would move, cast or resize the parameters of a sharded model without the engine."""
    for module in engine.model.modules():
        engine.handles.append(Patch(module, "_apply", partial(_apply, engine, module)))
        if hasattr(type(module), "resize_token_embeddings"):
            engine.handles.append(Patch(module, "resize_token_embeddings", partial(_resize, engine, module)))


def _resize(engine: ModelUnits, module: nn.Module, num_rows: int | None = None, *args, **kwargs) -> nn.Module:
    """Refuses to resize embeddings; it replaces transformers' method.

    Raises:
        `LifecycleError`: when there is to be another number of rows.
    """
    embedding = module.get_input_embeddings()
    if kwargs.get("new_num_tokens", num_rows) not in (None, embedding.weight.shape[0]):
        raise LifecycleError(
            f"resize_token_embeddings: the model is sharded with {embedding.weight.shape[0]} rows; {PLAIN_AGAIN}"
        )
    return embedding


def _apply(engine: ModelUnits, module: nn.Module, fn, recurse: bool = True) -> nn.Module:
    """Replaces `module._apply`, which `module.to(...)` and `module.half()` call, so that parameters stay as the engine
    has them.

    Raises:
        `LifecycleError`: when they were to change.
    """
    if not all(_is_kept(sample, fn(sample)) for sample in _samples(engine)):
        raise LifecycleError(
            f"{type(module).__name__}: the model is sharded, so its parameters cannot be moved or cast; {PLAIN_AGAIN}"
        )
    for part in module.modules() if recurse else [module]:
        part._buffers.update({name: fn(buffer) for name, buffer in part._buffers.items() if buffer is not None})
    return module


def _samples(engine: ModelUnits) -> list[Tensor]:
    """Returns one number for each dtype in which the parameters are shown, on their device."""
    dtypes = {flat.cast or flat.dtype for flat in engine.flats}
    return [torch.ones((), dtype=dtype, device=engine.comm.device) for dtype in sorted(dtypes, key=str)]


def _is_kept(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor has stayed what and where it was."""
    if after is before:
        return True
    stays = is_on(after, before.device) and after.dtype is before.dtype
    return stays and torch.equal(before, after.to(before.device))


# [Note: other parameters] To show a model in another dtype, its modules are given other parameters for a while:
# autograd forgets the hooks on a parameter whose data changes its dtype.


@contextmanager
def computing_in(engine: ModelUnits, dtype: torch.dtype) -> Iterator[None]:
    """See `ShardedModel.computing_in`."""
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


def _show(engine: ModelUnits) -> None:
    """Makes the parameters whole or placeholders, as their units say."""
    for unit in engine.units:
        for flat in unit.flats:
            flat.holders = None  # of other parameters
            flat.unshard() if unit.is_unsharded else flat.reshard()
