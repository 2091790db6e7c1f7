"""Attention over whole sequences of which each rank holds a part: heads are exchanged for positions and back.

Before attention every rank has all heads of its positions. It sends the heads of each other rank there, and then has
its own heads for all positions; after attention the outputs go back the same way (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3.1). What lies between, with masks, windows and caps, is the attention that the model has chosen: models of
transformers look it up by `AttentionInterface.get_interface` in each forward, and there the exchange is put around it.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from math import lcm
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_zero.comm import Comm
from hf_zero.engine.away import in_backward
from hf_zero.errors import UnsupportedError


class DividedForward:
    """One forward of a model in which each rank of a sequence group computes a part of the positions.

    The parts are equally long. The last ones end with padding where the number of ranks does not divide the length.

    Args:
        comm (`Comm`): the ranks of the group.
        num_rows (`int`): whole sequences in the batch.
        length (`int`): of each.
        keeps_length (`bool`): what follows the blocks looks at rows of `length` tokens, see `rows_of`.
        keeps_rows (`bool`): and at as many rows as the batch has.
    """

    def __init__(self, comm: Comm, num_rows: int, length: int, keeps_length: bool = False, keeps_rows: bool = False):
        self.comm = comm
        self.num_rows = num_rows
        self.length = length
        self.keeps_length = keeps_length
        self.part = -(-length // comm.num_ranks)
        self._num_laid_out = num_rows if keeps_rows else -(-num_rows * self.part // length)  # rows of `rows_of`
        self.positions: Tensor | None = None  # of all tokens, as the blocks are given them
        # what the blocks are given of positions, by `id`, with this rank's part of it; until the forward ends
        self.shared: dict[int, tuple[Any, Any]] = {}
        self.num_attentions = 0  # in the block that is under way

    def part_of(self, whole: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Returns this rank's part of a tensor in memory of its own, padded with `fill`."""
        start = min(self.comm.rank * self.part, self.length)
        stop = min(start + self.part, self.length)
        part = whole.narrow(dim, start, stop - start)
        return self._padded(part, dim, self.part, fill) if stop - start < self.part else part.clone()

    def rows_of(self, own: Tensor, fill: float = 0) -> Tensor:
        """Returns this rank's tokens, `(num_rows, part, ...)`, as what follows the blocks takes them. Some models give
        the outputs the shape of their inputs; for these the tokens are laid out in fewer rows, as long as the whole
        sequences, the last one padded. Where their number is fixed, too, there are rows of padding. What follows the
        blocks takes each token by itself."""
        if not self.keeps_length:
            return own
        tokens = self._padded(own.flatten(0, 1), 0, self._num_laid_out * self.length, fill)
        return tokens.unflatten(0, (-1, self.length))

    def tokens_of(self, rows: Tensor) -> Tensor | None:
        """Returns what `rows_of` was given, `(num_rows, part, ...)`; `None` for another tensor."""
        if not self.keeps_length:
            return rows if rows.shape[:2] == (self.num_rows, self.part) else None
        if rows.shape[:2] != (self._num_laid_out, self.length):
            return None
        return rows.flatten(0, 1)[: self.num_rows * self.part].unflatten(0, (self.num_rows, self.part))

    def attend(
        self,
        function: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Calls an attention function with this rank's heads and all positions.

        Args:
            query, key, value (`Tensor`): all heads of this rank's positions, `(batch, heads, part, dim)`.
            attention_mask: as the model has made it for the whole sequences.

        Returns:
            `Tensor`, `(batch, part, heads, dim)`, and no weights.

        Raises:
            `UnsupportedError`: the heads cannot be divided, or the keys are not those of this rank's positions.
        """
        name, num_ranks, heads = type(module).__name__, self.comm.num_ranks, query.shape[1]
        if not query.shape[2] == key.shape[2] == value.shape[2] == self.part:
            raise UnsupportedError(
                f"sequence_parallel: {name} attends from {query.shape[2]} positions to {key.shape[2]}, expected the "
                f"{self.part} of a part; train without a cache and without cross-attention, or leave it out"
            )
        refuse_undivided_heads(name, heads, num_ranks)
        if kwargs.get("position_bias") is not None:
            raise UnsupportedError(f"sequence_parallel: {name} adds a bias for each pair of positions; leave it out")
        self.num_attentions += 1
        DIVIDED.add(module)
        key, value = _repeated(key, heads, num_ranks), _repeated(value, heads, num_ranks)
        groups = heads // key.shape[1]
        query, key, value = (
            tensor.narrow(2, 0, self.length) for tensor in _HeadExchange.apply(self.comm, query, key, value)
        )
        own = slice(self.comm.rank * heads // num_ranks, (self.comm.rank + 1) * heads // num_ranks)
        if isinstance(kwargs.get("s_aux"), Tensor):
            kwargs["s_aux"] = kwargs["s_aux"][own]
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = self.positions
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] == heads > 1:
            attention_mask = attention_mask[:, own]
        output, _ = function(_shown(module, own, groups), query, key, value, attention_mask, **kwargs)
        output = self._padded(output, 1, self.part * num_ranks)
        return _HeadExchange.apply(self.comm, output)[0], None

    @staticmethod
    def _padded(tensor: Tensor, dim: int, length: int, fill: float = 0) -> Tensor:
        missing = length - tensor.shape[dim]
        behind = tensor.dim() - 1 - dim % tensor.dim()
        return F.pad(tensor, (0, 0) * behind + (0, missing), value=fill) if missing else tensor


def refuse_undivided_heads(name: str, heads: int, num_ranks: int) -> None:
    """Refuses a number of heads that the ranks of a sequence group cannot divide equally."""
    if heads % num_ranks:
        raise UnsupportedError(
            f"sequence_parallel: {name} has {heads} heads, which {num_ranks} ranks cannot divide equally; give a "
            f"divisor of {heads}"
        )


def _repeated(tensor: Tensor, heads: int, num_ranks: int) -> Tensor:
    """Repeats the heads of keys or values so often that each rank has what its heads of the query need."""
    own = tensor.shape[1]
    times = lcm(own, num_ranks) // own
    if heads % (own * times):
        times = heads // own
    return tensor.repeat_interleave(times, dim=1) if times > 1 else tensor


def _shown(module: nn.Module, own: slice, num_groups: int) -> nn.Module:
    """Shows a function an attention module that has some of its heads."""
    shown = copy(module)
    if hasattr(module, "num_key_value_groups"):
        shown.num_key_value_groups = num_groups
    if isinstance(getattr(module, "sinks", None), Tensor):
        vars(shown)["sinks"] = module.sinks[own]  # the parameters are those of both
    return shown


class _HeadExchange(torch.autograd.Function):
    """Sends each rank its range of the second dimension, and joins what comes along the third: heads and positions
    before attention, positions and heads behind it."""

    @staticmethod
    def forward(ctx, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return exchanged(comm, 1, 2, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        return None, *exchanged(ctx.comm, 2, 1, grads)


def exchanged(comm: Comm, cut_dim: int, join_dim: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sends each rank its range of every tensor along one dimension, and returns what comes, joined along
    another.

    Args:
        comm (`Comm`): the ranks, which call it with tensors of the same shapes.
        cut_dim, join_dim (`int`): these dimensions; the number of ranks divides the former.
        tensors (`tuple[Tensor, ...]`): of one or several dtypes.
    """
    sends, receives, found = [], [], []
    for tensor in tensors:
        parts = [part.contiguous() for part in tensor.chunk(comm.num_ranks, cut_dim)]
        coming = [part if rank == comm.rank else torch.empty_like(part) for rank, part in enumerate(parts)]
        for distance in range(1, comm.num_ranks):
            target, source = (comm.rank + distance) % comm.num_ranks, (comm.rank - distance) % comm.num_ranks
            sends.append((parts[target], target))
            receives.append((coming[source], source))
        found.append(coming)
    comm.exchange(sends, receives, what="attention").wait()
    return tuple(torch.cat(coming, join_dim) for coming in found)


# Which forward is under way

_OPEN = threading.local()


def divided_forward() -> DividedForward | None:
    """Returns the divided forward that this thread computes, or computes anew; `None` where there is none."""
    stack = getattr(_OPEN, "stack", None)
    return stack[-1] if stack else None


def begin_divided(forward: DividedForward | None) -> int:
    """Begins a forward; `None`: one over whole sequences. Returns how many were open before, for `end_divided`."""
    if not hasattr(_OPEN, "stack"):
        _OPEN.stack = []
    _OPEN.stack.append(forward)
    return len(_OPEN.stack) - 1


def end_divided(outside: int) -> None:
    """Ends all forwards but the first `outside` ones."""
    del _OPEN.stack[outside:]


@contextmanager
def part_of_forward(forward: DividedForward | None) -> Iterator[None]:
    """Computes as a part of a forward, for as long as the context lasts."""
    outside = begin_divided(forward)
    try:
        yield
    finally:
        end_divided(outside)


# Blocks that backward computes anew

DIVIDED: WeakSet[nn.Module] = WeakSet()  # blocks and attentions that have computed a part of their sequences


def refuse_recomputed(module: nn.Module) -> None:
    """Refuses to compute a block anew in backward, outside of the divided forward that it was part of."""
    if in_backward() and module in DIVIDED:
        raise UnsupportedError(
            f"sequence_parallel: {type(module).__name__} is computed anew in backward by a checkpoint that does not "
            "know its part of the sequences; use model.gradient_checkpointing_enable() in its place"
        )


def _attend_whole(function: Callable, module: nn.Module, *args, **kwargs) -> Any:
    refuse_recomputed(module)
    return function(module, *args, **kwargs)


class AttentionLookup:
    """Puts the exchange around what transformers' models look up as their attention, until it is removed or dropped.
    All models share one lookup, so only the first of these changes it, and only the last one changes it back."""

    _num_users = 0
    _former: Callable | None = None

    def __init__(self):
        interface = sys.modules["transformers.modeling_utils"].AttentionInterface
        if AttentionLookup._num_users == 0:
            AttentionLookup._former = former = interface.get_interface

            def get_interface(registry, *args, **kwargs):
                function, forward = former(registry, *args, **kwargs), divided_forward()
                return partial(_attend_whole, function) if forward is None else partial(forward.attend, function)

            interface.get_interface = get_interface
        AttentionLookup._num_users += 1
        self.remove = finalize(self, _put_back, interface)  # it goes with its model, too
        self.remove.atexit = False


def _put_back(interface: Any) -> None:
    AttentionLookup._num_users -= 1
    if AttentionLookup._num_users == 0:
        interface.get_interface = AttentionLookup._former
