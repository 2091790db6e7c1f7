"""The dtype in which a sharded model is seen: it can be another for a while, but never for good."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.engine.patch import Patch
from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


def guard(engine: "ZeroEngine") -> None:
    """Lets nobody move or cast the parameters of a sharded model past the engine."""
    for module in engine.model.modules():
        engine.handles.append(Patch(module, "_apply", partial(_apply, engine, module)))


def _apply(engine: "ZeroEngine", module: nn.Module, fn, recurse: bool = True) -> nn.Module:
    """What `module.to(...)`, `module.half()` and their like call: parameters stay as and where the engine has them.

    Raises:
        `LifecycleError`: when they were to change.
    """
    if any(fn(value) is not value for value in _samples(engine)):
        raise LifecycleError(
            f"{type(module).__name__}: the model is sharded, so its parameters cannot be moved or cast; do it before "
            "hf_zero.shard, or after engine.unshard()"
        )
    for part in module.modules() if recurse else [module]:
        part._buffers.update({name: fn(buffer) for name, buffer in part._buffers.items() if buffer is not None})
    return module


def _samples(engine: "ZeroEngine") -> list[Tensor]:
    """One number for each dtype in which the parameters are shown, on their device."""
    dtypes = {flat.cast or flat.dtype for unit in engine.units for flat in unit.flats}
    return [torch.zeros((), dtype=dtype, device=engine.comm.device) for dtype in sorted(dtypes, key=str)]


@contextmanager
def computing_in(engine: "ZeroEngine", dtype: torch.dtype) -> Iterator[None]:
    """See `ZeroEngine.computing_in`."""
    buffers = [
        (part, name, value)
        for part in engine.model.modules()
        for name, value in part._buffers.items()
        if value is not None and value.is_floating_point()
    ]
    try:
        _show(engine, dtype)
        for part, name, value in buffers:
            part._buffers[name] = value.to(dtype)
        with torch.no_grad():
            yield
    finally:
        _show(engine, None)
        for part, name, value in buffers:
            part._buffers[name] = value


def _show(engine: "ZeroEngine", dtype: torch.dtype | None) -> None:
    for unit in engine.units:
        for flat in unit.flats:
            flat.cast = dtype if flat.dtype.is_floating_point else None
            if unit.is_whole:
                flat.attach()
