"""MLPs that compute one tile of tokens at a time (Arctic Long Sequence Training, arXiv 2506.13996, section 3.1).

The inner activations of an MLP are the widest of a block, and grow with the sequence. A tiled MLP saves only its
input. The backward recomputes each tile just before its gradients, so inner activations exist for one tile at a time.
Gradients of the weights accumulate tile by tile, where autograd or the engine collects them.

[Note: two functions] `_Keep` saves the input, and then `_Compute` computes the output. Non-reentrant checkpointing of
a block stops its recomputation at the last tensor that was saved. This is the MLP's input if nothing behind the MLP
saves more, so the MLP is computed twice in all, as without tiles.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import update_wrapper

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_zero.engine.direct import autocast_dtype
from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.opaque import is_opaque
from hf_zero.engine.partition import partition
from hf_zero.engine.patch import Installed, Patch, Uncopyable
from hf_zero.errors import UnsupportedError


# Class names of MLPs in transformers.
_NAME = re.compile("((MLP|Mlp|FFN|FeedForward)(Block|Layer|Network)?|Dense(Gated)?ActDense)$")
# Modules that combine tokens, and class names of modules that choose between experts.
_MIXING = (nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd)
_ROUTING = ("Router", "Experts")


def find_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost MLPs of a model's blocks that can be tiled, by name."""
    found: dict[str, nn.Module] = {}
    for block in (unit for stack in partition(model).stacks for unit in stack.blocks):
        last = None  # the modules inside an MLP follow it
        for name, module in block.module.named_modules(prefix=block.name):
            is_inside = last is not None and name.startswith(f"{last}.")
            if module is not block.module and not is_inside and _is_mlp(module):
                found[name], last = module, name
    return found


def _is_mlp(module: nn.Module) -> bool:
    """Returns whether a module is an MLP that can be tiled, by its class name. It must take one tensor, and neither
    combine tokens nor route them to experts, nor be quantized or tensor-parallel."""
    params = inspect.signature(module.forward).parameters.values()
    return (
        _NAME.search(type(module).__name__) is not None
        and sum(param.default is param.empty for param in params) == 1
        and not any(is_opaque(weight) or is_dtensor(weight) for weight in module.parameters())
        and not any(isinstance(part, _MIXING) or type(part).__name__.endswith(_ROUTING) for part in module.modules())
    )


class TiledMlp(Installed):
    """Computes the MLPs of a model's blocks one tile of tokens at a time.

    Args:
        engine (`ZeroEngine`): The model's engine.
        num_tiles (`int` or `str`): Number of tiles per micro-batch. "auto" limits the number of tokens of a tile to
            the number of their features.
    """

    def __init__(self, engine: ZeroEngine, num_tiles: int | str):
        super().__init__(engine)
        for mlp in dict.fromkeys(find_mlps(engine.model).values()):
            self._handles.append(Patch(mlp, "forward", _TiledForward(mlp, num_tiles)))


class _TiledForward(Uncopyable):
    """The tiled forward of an MLP."""

    def __init__(self, mlp: nn.Module, num_tiles: int | str):
        update_wrapper(self, mlp.forward)  # keeps the signature
        self.compute: Callable[..., Tensor] = mlp.forward
        self._mlp = mlp
        self._num_tiles = num_tiles

    def __call__(self, *args, **kwargs):
        given = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(given, Tensor) or given.dim() not in (2, 3):
            return self.compute(*args, **kwargs)
        num_tokens = given.shape[:-1].numel()
        size = given.shape[-1] if self._num_tiles == "auto" else -(-num_tokens // int(self._num_tiles))
        # hooks on parameters expect complete gradients
        is_hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._mlp.parameters())
        if num_tokens <= size or is_hooked:
            return self.compute(given)
        params = [param for param in self._mlp.parameters() if param.requires_grad]
        return _Compute.apply(_Keep.apply(given, self.compute, size, *params), self.compute, size)


class _Keep(torch.autograd.Function):
    """Saves an MLP's input and returns it. The backward receives the gradient of the MLP's output."""

    @staticmethod
    def forward(ctx, given, compute, size, *params):
        ctx.compute, ctx.size, ctx.num_params = compute, size, len(params)
        ctx.dtype = autocast_dtype(given.device.type)
        ctx.states = torch.get_rng_state(), *get_device_states(given)
        ctx.save_for_backward(given)
        return given.view_as(given)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            raise UnsupportedError("tiled_mlp: torch.autograd.grad is not supported; call loss.backward()")
        (given,) = ctx.saved_tensors
        grad_given = given.new_empty(given.shape[:-1].numel(), given.shape[-1]) if ctx.needs_input_grad[0] else None
        grads = grad.reshape(-1, grad.shape[-1])
        with _drawing_again(ctx.states, given.device), _casting(given, ctx.dtype):
            for rows, tile in tiles_of(given, ctx.size):
                tile = tile.detach().requires_grad_(grad_given is not None)
                with torch.enable_grad():
                    out = ctx.compute(tile)
                torch.autograd.backward(out, grads[rows].view(out.shape).to(out.dtype))
                if grad_given is not None:
                    grad_given[rows] = tile.grad.view(-1, grad_given.shape[-1])
                del out, tile  # free them before the next tile
        return (None if grad_given is None else grad_given.view(given.shape), None, None, *[None] * ctx.num_params)


class _Compute(torch.autograd.Function):
    """Computes an MLP's output without saving tensors. Passes the gradient on to `_Keep`."""

    @staticmethod
    def forward(ctx, given, compute, size):
        output: Tensor | None = None
        with _casting(given, autocast_dtype(given.device.type)):
            for rows, tile in tiles_of(given, size):
                part = compute(tile)
                if output is None:
                    output = part.new_empty(*given.shape[:-1], part.shape[-1])
                output.view(-1, output.shape[-1])[rows] = part.view(-1, output.shape[-1])
                del part
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def tiles_of(given: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the range and the values of each tile of tokens. The values have as many dimensions as `given`."""
    rows = given.reshape(-1, given.shape[-1])
    for start in range(0, len(rows), size):
        tile = rows[start : start + size]
        yield slice(start, start + size), tile if given.dim() == 2 else tile[None]


def _casting(given: Tensor, dtype: torch.dtype | None):
    """Returns a context with autocast to `dtype` or none. It does not cache casts: a cast that is cached in no-grad
    mode would have no gradient later."""
    if dtype is None and autocast_dtype(given.device.type) is None:
        return nullcontext()
    return torch.autocast(given.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def _drawing_again(states: tuple, device: torch.device) -> Iterator[None]:
    """Restores the generators to `states` inside the context, so that recomputation draws the same random numbers."""
    on_cpu, devices, on_devices = states
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(on_cpu)
        set_device_states(devices, on_devices, device_type=kind)
        yield
