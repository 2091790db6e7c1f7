"""Functions of torch that look at `p.grad`, which sharded parameters do not have. They would silently do nothing, so
they refuse."""

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_zero.engine.access import unit_of
from hf_zero.engine.gradient_reads import grad_of
from hf_zero.errors import LifecycleError


# What clips, by the function that a script calls. `clip_grad_norm_` looks its part up when it is called: it may have
# been imported before.
CLIPPING = {"_clip_grads_with_norm_": "clip_grad_norm_", "clip_grad_value_": "clip_grad_value_"}

_SLICE = "_hf_zero_slice"  # an attribute


@cache
def guard_gradients() -> RemovableHandle:
    """Lets torch's optimizers, its functions that clip, its `GradScaler` and `DistributedDataParallel` refuse trained
    parameters of sharded models from now on in this process. All others are stepped, clipped, scaled and wrapped as
    ever. Returns the handle of the hook on all optimizers, the same at every call."""
    for name, called in CLIPPING.items():
        original = getattr(clip_grad, name, None)
        if original is None:
            continue  # of another version of torch
        refusing = _refusing(original, called)
        for module in (clip_grad, torch.nn.utils):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                setattr(module, alias, refusing)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = _scaling(scaler._unscale_grads_)
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrapper.__init__ = _wrapping(wrapper.__init__)
    return register_optimizer_step_pre_hook(_refuse_step)


def marked_as_slices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Notes on what a sharded optimizer shows in its groups that its gradients are not there but within its step."""
    for param in params:
        setattr(param, _SLICE, True)
    return params


def _are_sharded(params: Iterable[Tensor]) -> bool:
    # Within `gathered` a script may set the gradients of some by hand, and step and clip these.
    grads = [grad_of(param) for param in params if param.requires_grad and unit_of(param) is not None]
    return bool(grads) and all(grad is None for grad in grads)


def _refuse_step(optimizer: torch.optim.Optimizer, *_) -> None:
    if _are_sharded(param for group in optimizer.param_groups for param in group["params"]):
        name = type(optimizer).__name__
        raise LifecycleError(
            f"{name}: holds parameters of a sharded model, whose gradients are divided over the ranks; it would "
            "update nothing; give it to hf_zero.ShardedOptimizer(model, optimizer), or to ZeroAccelerator.prepare, "
            "and step what you get"
        )


def _refusing(original: Callable, called: str) -> Callable:
    @wraps(original)
    def clip(parameters, *args, **kwargs):
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_sharded(params) or any(grad_of(param) is None and hasattr(param, _SLICE) for param in params):
            raise LifecycleError(
                f"torch.nn.utils.{called}: was given parameters of a sharded model, whose gradients are divided over "
                f"the ranks; it would clip nothing; call {called} of the ShardedOptimizer, or accelerator.{called}"
            )
        return original(params, *args, **kwargs)

    return clip


def _scaling(original: Callable) -> Callable:
    @wraps(original)
    def unscale(scaler, optimizer, *args, **kwargs):
        if any(hasattr(param, _SLICE) for group in optimizer.param_groups for param in group["params"]):
            raise LifecycleError(
                f"{type(scaler).__name__}: does not see the gradients of a ShardedOptimizer, which are divided over "
                "the ranks; use hf_zero.ZeroGradScaler, whose ranks skip a step together"
            )
        return original(scaler, optimizer, *args, **kwargs)

    return unscale


def _wrapping(original: Callable) -> Callable:
    @wraps(original)
    def init(wrapper, module, *args, **kwargs):
        if any(param.requires_grad and unit_of(param) is not None for param in module.parameters()):
            raise LifecycleError(
                "DistributedDataParallel: was given a sharded model, whose ranks train it together as it is; call the "
                "model itself, and leave the wrapper out"
            )
        original(wrapper, module, *args, **kwargs)

    return init
