"""Position-wise MLPs, computed for a tile of tokens after the other (Arctic Long Sequence Training, arXiv 2506.13996,
section 3.1).

The inner activations of an MLP are the widest of a block, and grow with the sequence. Here the forward keeps the MLP's
input alone, and the backward computes each tile again, just before its gradients. So inner activations exist for one
tile at a time. Gradients of the weights are added up where autograd or the engine collects them, tile by tile.

[Note: two functions] `_Keep` saves the input, and then `_Compute` computes the output. Non-reentrant checkpointing of
a block stops its recomputation at the last tensor that was saved. That is the MLP's input where nothing behind the MLP
saves more, so the MLP is then computed twice in all, as without tiles.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import update_wrapper

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_zero.activation.installed import Installed
from hf_zero.activation.position_wise import has_one_argument, position_wise_mlp
from hf_zero.engine.direct import autocast_dtype
from hf_zero.engine.engine import DOUBLE_BACKWARD, ZeroEngine
from hf_zero.engine.partition import partition
from hf_zero.engine.patch import Patch, Uncopyable
from hf_zero.errors import UnsupportedError


logger = logging.getLogger(__name__)


def find_mlps(model: nn.Module, *, only_first: bool = False) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the position-wise MLPs of a model's blocks by name, the outermost in each block, and what was left out:
    reasons by name, for blocks in which there is none, and for modules that are none and hold one, as experts do that
    are shared among others.

    Args:
        only_first (`bool`): blocks behind the first that has one are not looked at.
    """
    mlps: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for unit in (unit for stack in partition(model).stacks for unit in stack.blocks):
        block = model.get_submodule(unit.name)
        reasons: dict[str, str] = {}
        own = _mlps_in(block, unit.name, reasons)
        mlps.update(own)
        for name, reason in reasons.items():
            if any(found.startswith(f"{name}.") for found in own):
                left_out[name] = reason
        if not own:
            left_out[unit.name] = "; ".join([type(block).__name__, *reasons.values()])
        elif only_first:
            break
    return mlps, left_out


def _mlps_in(module: nn.Module, path: str, reasons: dict[str, str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        own = f"{path}.{name}"
        reason: str | None = ""
        if has_one_argument(child):
            reason = position_wise_mlp(child)
        if reason is None:
            found[own] = child
            continue
        if reason:
            reasons[own] = f"{type(child).__name__}: {reason}"
        found |= _mlps_in(child, own, reasons)
    return found


def refuse_untileable(model: nn.Module) -> None:
    """Refuses a model in whose blocks no position-wise MLP is found."""
    mlps, left_out = find_mlps(model, only_first=True)
    if not mlps:
        found = next(iter(left_out.items()), ("it has no blocks",))
        raise UnsupportedError(
            f"tiled_mlp: no block of {type(model).__name__} has an MLP that is proven to compute each position by "
            f"itself ({': '.join(found)}); leave tiled_mlp out"
        )


class TiledMlp(Installed):
    """Computes the MLPs of a model's blocks a tile of tokens at a time, until it is removed.

    Args:
        num_tiles (`int` or `str`): into how many tiles the tokens of a micro-batch are divided; "auto": so many that a
            tile has at most as many tokens as they have features.
    """

    def __init__(self, engine: ZeroEngine, num_tiles: int | str):
        super().__init__(engine)
        self._has_told = False
        self.mlps, left_out = find_mlps(engine.model)
        if left_out and engine.comm.rank == 0:
            name, reason = next(iter(left_out.items()))
            logger.warning(
                "hf_zero: tiled_mlp: of %d modules all tokens are computed at once, such as %s (%s)",
                len(left_out),
                name,
                reason,
            )
        for mlp in dict.fromkeys(self.mlps.values()):
            self._handles.append(Patch(mlp, "forward", _TiledForward(mlp, num_tiles, self._tell_hooked)))
        self._handles.append(engine.model.register_forward_pre_hook(self._refuse_compiled))

    def _tell_hooked(self, mlp: nn.Module) -> None:
        """Says once that hooks on parameters keep an MLP from being computed in tiles."""
        if not self._has_told and self._engine.comm.rank == 0:
            name = next(name for name, each in self.mlps.items() if each is mlp)
            logger.warning(
                "hf_zero: tiled_mlp: %s has hooks on its parameters, which see whole gradients; all tokens are "
                "computed at once where that is so",
                name,
            )
        self._has_told = True

    def _refuse_compiled(self, *_) -> None:
        if self._engine.compiled_with is not None:
            raise UnsupportedError(
                "tiled_mlp: compiled blocks keep inner activations inside their graphs; leave compilation or "
                "tiled_mlp out"
            )


class _TiledForward(Uncopyable):
    """The forward of one MLP.

    Args:
        tell_hooked (`Callable`): is given the MLP when it has hooks on parameters.
    """

    def __init__(self, mlp: nn.Module, num_tiles: int | str, tell_hooked: Callable[[nn.Module], None]):
        update_wrapper(self, mlp.forward)  # whose signature is looked at
        self._compute: Callable[..., Tensor] = mlp.forward
        self._mlp = mlp
        self._num_tiles = num_tiles
        self._tell_hooked = tell_hooked
        self._name = next(iter(inspect.signature(mlp.forward).parameters))

    def __call__(self, *args, **kwargs):
        given = args[0] if args else kwargs.get(self._name)
        # what was proven of one tensor holds of no further arguments
        if len(args) + len(kwargs) > 1 or not isinstance(given, Tensor) or given.dim() not in (2, 3):
            return self._compute(*args, **kwargs)
        size = self._tokens_of_tile(given)
        if given.shape[:-1].numel() <= size:
            return self._compute(given)
        if self._has_parameter_hooks():
            self._tell_hooked(self._mlp)
            return self._compute(given)
        params = [param for param in self._mlp.parameters() if param.requires_grad]
        if not torch.is_grad_enabled() or not (params or given.requires_grad):
            return self.forward(given, size)
        return _Compute.apply(_Keep.apply(given, self, size, *params), self, size)

    def _has_parameter_hooks(self) -> bool:
        """Whether somebody has put hooks on its parameters, which would be given the gradients of a tile each."""
        return any(param._backward_hooks or param._post_accumulate_grad_hooks for param in self._mlp.parameters())

    def _tokens_of_tile(self, given: Tensor) -> int:
        if self._num_tiles == "auto":
            return given.shape[-1]
        return -(-given.shape[:-1].numel() // int(self._num_tiles))

    def forward(self, given: Tensor, size: int) -> Tensor:
        """Returns the output for an input `(..., hidden_size)`, without gradients, by tiles of so many tokens."""
        out: Tensor | None = None
        with torch.no_grad(), _casting(given, autocast_dtype(given.device.type)):
            for rows, tile in tiles_of(given, size):
                part = self._compute(tile)
                if out is None:
                    out = part.new_empty(given.shape)
                out.view(-1, out.shape[-1])[rows] = part.reshape(-1, out.shape[-1])
                del part  # before the next tile's
        assert out is not None
        return out

    def backward(self, given: Tensor, grad: Tensor, size: int, needs: Tensor | None, params: list) -> list[Tensor]:
        """Computes each tile again, and its gradients. Those of the weights go where autograd collects them.

        Args:
            needs (`Tensor`, *optional*): gets the gradient of the input, `(num_tokens, hidden_size)`.
            params (`list`): of which the gradients are returned instead.
        """
        sums: list[Tensor] = []
        grads = grad.reshape(-1, grad.shape[-1])
        for rows, tile in tiles_of(given, size):
            tile = tile.detach().requires_grad_(needs is not None)
            with torch.enable_grad():
                out = self._compute(tile)
            part = grads[rows].view(out.shape).to(out.dtype)
            if not params:
                torch.autograd.backward(out, part)
                found = [tile.grad]
            else:
                wanted = [tile, *params] if needs is not None else params
                found = list(torch.autograd.grad(out, wanted, part, materialize_grads=True))
                own = found[-len(params) :]
                # two parameters may have been given one tensor
                sums = [total + new for total, new in zip(sums, own)] if sums else own
            if needs is not None:
                needs[rows] = found[0].view(-1, needs.shape[-1])
            del out, part, found, tile
        return sums


def tiles_of(given: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Returns the tiles of all tokens: their range, and their values, of as many dimensions as `given`."""
    rows = given.reshape(-1, given.shape[-1])
    for start in range(0, len(rows), size):
        tile = rows[start : start + size]
        yield slice(start, start + size), tile if given.dim() == 2 else tile[None]


def _casting(given: Tensor, dtype: torch.dtype | None):
    """Returns autocast to a dtype, or none. It keeps no casts: those that were made without gradients would have
    none."""
    if dtype is None and autocast_dtype(given.device.type) is None:
        return nullcontext()
    return torch.autocast(given.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def _drawing_again(states: tuple, device: torch.device) -> Iterator[None]:
    """Lets random numbers be drawn inside the context as they were when the states were taken."""
    on_cpu, devices, on_devices = states
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(on_cpu)
        set_device_states(devices, on_devices, device_type=kind)
        yield


class _Keep(torch.autograd.Function):
    """Saves an MLP's input, and hands it on. Its backward is given the gradient of the MLP's output."""

    @staticmethod
    def forward(ctx, given, tiled, size, *params):
        ctx.tiled, ctx.size, ctx.params = tiled, size, params
        ctx.dtype = autocast_dtype(given.device.type)
        ctx.states = (torch.get_rng_state(), *get_device_states(given))
        ctx.save_for_backward(given)
        return given.view_as(given)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        (given,) = ctx.saved_tensors
        needs = given.new_empty(given.shape[:-1].numel(), given.shape[-1]) if ctx.needs_input_grad[0] else None
        # gradients that a caller asked for (`torch.autograd.grad`) are returned, and collected nowhere
        is_asked = not torch.autograd.Variable._execution_engine.is_checkpoint_valid()
        params = list(ctx.params) if is_asked else []
        with _drawing_again(ctx.states, given.device), _casting(given, ctx.dtype):
            sums = ctx.tiled.backward(given, grad, ctx.size, needs, params)
        own = sums if is_asked else [None] * len(ctx.params)
        return (None if needs is None else needs.view(given.shape), None, None, *own)


class _Compute(torch.autograd.Function):
    """Computes an MLP's output. It saves nothing, and hands the gradient on to `_Keep`."""

    @staticmethod
    def forward(ctx, kept, tiled, size):
        return tiled.forward(kept, size)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None
