"""Sequence parallelism: the ranks of a group share each sequence, and each rank holds the activations of its part
(DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1).

The ranks of a sequence group receive the same batch. The model embeds it and creates masks and positions for full
sequences. Before the first block, each rank selects its part of the positions. All further computations are local to a
position, except attention. An all-to-all before attention gives each rank a subset of the heads for all positions, and
another one after attention reverses it. The attention function itself, with its masks, windows and soft-capping, is
unchanged: transformers' models look it up with `AttentionInterface.get_interface` in each forward, and this module
wraps the result. Labels are shifted before they are split, so none is lost at a boundary.

[Note: the gradients of a group] Each rank's loss is that of the full batch: the sum over the parts of all ranks. The
backward of every rank's loss contributes to the gradient of a part, so that gradient is multiplied by the number of
ranks. Averaged over all ranks, the gradients of the parameters then equal those of ranks that each train on the full
batch.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from math import lcm
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from hf_zero.activation.checkpointing import FLAG, put_around, take_off
from hf_zero.comm import Comm
from hf_zero.comm.groups import refuse_no_divisor
from hf_zero.compat import is_pretrained
from hf_zero.engine.away import in_backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.partition import partition
from hf_zero.engine.patch import Installed
from hf_zero.errors import ConfigError, UnsupportedError


IGNORED = -100  # ignore index of labels
# Arguments of a block for full sequences, which it passes to its attention.
_FOR_ATTENTION = {"attention_mask", "causal_mask", "shift_labels", "labels", "num_items_in_batch", "seq_idx"}
_FOR_ATTENTION |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
# Arguments of a block with one value per position, and the dimension of the positions.
_POSITIONS = {"position_ids": -1, "cache_position": -1}
_POSITIONS |= dict.fromkeys(("position_embeddings", "position_embeddings_global", "position_embeddings_local"), -2)
# Config settings that sequence parallelism does not support.
_REFUSED = {
    "is_encoder_decoder": "has an encoder and a decoder",
    "output_router_logits": "adds the loss of a router, which is not a sum over positions",
    "layerdrop": "would drop different blocks on each rank",
}
# Modules other than attention that mix positions.
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
# Arguments of a forward whose results would only cover this rank's positions.
_REQUESTS = ("output_router_logits", "output_hidden_states", "output_attentions", "logits_to_keep")
_CACHES = ("past_key_values", "cache")  # names of a model's cache up to and after transformers 5.23


def refuse_undividable(model: nn.Module, num_parts: int) -> None:
    """Raises for a model that does not support sequence parallelism, as far as this is known before a forward."""
    language_model = _language_model(model)
    name = type(language_model or model).__name__
    loss = getattr(getattr(language_model, "loss_function", None), "__name__", None)
    if loss != "ForCausalLMLoss" or language_model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"sequence_parallel: {name} is not a causal language model of transformers, so its loss may not be a sum "
            "over positions; remove it"
        )
    config = language_model.config
    for setting, reason in _REFUSED.items():
        if getattr(config, setting, None):
            raise UnsupportedError(
                f"sequence_parallel: {name} {reason}; set model.config.{setting} = 0, or remove sequence_parallel"
            )
    stacks = partition(model).stacks
    if len(stacks) != 1:
        raise UnsupportedError(
            f"sequence_parallel: {name} has {len(stacks)} stacks of blocks, but only one is supported; remove it"
        )
    parts = (module for block in stacks[0].blocks for module in block.module.modules())
    mixing = next((module for module in parts if isinstance(module, _MIXING)), None)
    if mixing is not None:
        raise UnsupportedError(
            f"sequence_parallel: a block of {name} mixes positions with {type(mixing).__name__}, only attention is "
            "supported; remove it"
        )
    owner, source = type(stacks[0].owner), ""
    with suppress(OSError):  # a class without a file
        source = inspect.getsource(owner.forward)
    if ".view(output_shape)" in source:
        raise UnsupportedError(
            f"sequence_parallel: {owner.__name__} reshapes the output of its blocks to full sequences; remove it"
        )
    if isinstance(heads := getattr(config, "num_attention_heads", None), int):
        _refuse_undivided_heads(name, heads, num_parts)


def refuse_group_size(num_parts: int, num_ranks: int, name: str = "sequence_parallel") -> None:
    """Raises if `num_ranks` is not divisible by the size of a sequence group."""
    if num_parts < 1:
        raise ConfigError(f"{name}: {num_parts} is not a number of ranks; expected 1 or more")
    refuse_no_divisor(num_parts, num_ranks, name, "or start more ranks")


def _language_model(model: nn.Module) -> Any:
    """Returns the outermost model of transformers: `model` itself, or the model that PEFT wraps."""
    return next(filter(is_pretrained, model.modules()), None)


class SequenceParallel(Installed):
    """Splits the sequences of forwards with labels over the ranks of a group.

    Forwards without labels, such as those of `generate`, compute full sequences on every rank.

    Args:
        engine (`ZeroEngine`): The model's engine.
        comm (`Comm`): The ranks that share each sequence. All receive the same batch.

    Attributes:
        is_active (`bool`): Set it to `False` while forwards with labels should compute the logits of all positions.
    """

    def __init__(self, engine: ZeroEngine, comm: Comm):
        super().__init__(engine)
        self.comm = comm
        self.is_active = True
        self._model = _language_model(engine.model)
        self._parameters = list(inspect.signature(type(self._model).forward).parameters)[1:]
        blocks = list(engine.modules.values())
        self._checkpointed = [module for module in self._model.modules() if hasattr(module, FLAG)]
        _put_exchange_around_attention()
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._end, always_call=True))
        for block in blocks:
            names = list(inspect.signature(type(block).forward).parameters)[1:]
            self._handles.append(block.register_forward_pre_hook(partial(_before_block, names), with_kwargs=True))
            self._handles.append(block.register_forward_hook(_after_block))

    def remove(self) -> None:
        super().remove()
        take_off(self._checkpointed, _within_forward)
        _DIVIDED.difference_update(self._model.modules())

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        _CURRENT.forward = None  # hooks do not run after every interruption of a forward
        given = {**dict(zip(self._parameters, args)), **kwargs}
        labels, targets = given.get("labels"), given.get("shift_labels")
        if not self.is_active or (labels is None and targets is None):
            return None
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        if targets.dim() != 2 or targets.shape[1] < 2:
            return None
        self._refuse(given)
        _CURRENT.forward = forward = DividedForward(self.comm, *targets.shape)
        put_around(self._checkpointed, _within_forward)
        changed = {"shift_labels": forward.part_of(targets, 1, IGNORED)}
        if given.get("num_items_in_batch") is None:
            changed["num_items_in_batch"] = (targets != IGNORED).sum()
        return args, {**kwargs, **changed}

    def _refuse(self, given: dict[str, Any]) -> None:
        """Raises for arguments of a forward whose results would not be those of full sequences."""
        for name in (*_REQUESTS, *_CACHES):
            asked = given.get(name)
            if asked is None:
                asked = getattr(self._model.config, name, None)
            if asked is not None and (asked or name in _CACHES):
                raise UnsupportedError(
                    f"sequence_parallel: {name} with labels needs full sequences on each rank; remove {name}, or call "
                    "the model without labels"
                )

    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        forward, _CURRENT.forward = divided_forward(), None
        if forward is None or output is None:
            return None
        forward.shared.clear()
        if isinstance(output, tuple):
            return (_group_loss(self.comm, output[0]), *output[1:])
        if output.get("loss") is None:
            raise UnsupportedError(
                f"sequence_parallel: {type(module).__name__} received labels but returned no loss; remove it"
            )
        for name in _CACHES:
            if output.get(name) is not None:
                output[name] = None  # covers only this rank's positions
        output.loss = _group_loss(self.comm, output.loss)
        for name, value in list(output.items()):  # gather outputs with one value per token
            if isinstance(value, Tensor) and value.shape == (forward.num_rows, forward.part):
                output[name] = _GroupTokens.apply(self.comm, value, "values of tokens")[:, : forward.length]
        return output


class DividedForward:
    """One forward of a model in which each rank of a sequence group computes a part of the positions.

    All parts have the same length. If the number of ranks does not divide the sequence length, the last parts are
    padded.

    Args:
        comm (`Comm`): The ranks of the group.
        num_rows (`int`): Number of sequences in the batch.
        length (`int`): Length of the full sequences.
    """

    def __init__(self, comm: Comm, num_rows: int, length: int):
        self.comm = comm
        self.num_rows = num_rows
        self.length = length
        self.part = -(-length // comm.num_ranks)
        self.positions: Tensor | None = None  # `position_ids` of all tokens
        # arguments of the blocks with positions, by `id`, and this rank's part of them; cleared after the forward
        self.shared: dict[int, tuple[Any, Any]] = {}
        self.num_attentions = 0  # attention calls in the current block

    def part_of(self, whole: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Returns a copy of this rank's part of a tensor, padded with `fill`."""
        start = min(self.comm.rank * self.part, self.length)
        stop = min(start + self.part, self.length)
        part = whole.narrow(dim, start, stop - start)
        return self._padded(part, dim, self.part, fill) if stop - start < self.part else part.clone()

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
            function (`Callable`): The attention function of the model.
            module (`nn.Module`): The attention module.
            query, key, value (`Tensor`): All heads of this rank's positions, `(batch, heads, part, dim)`.
            attention_mask: The model's mask for full sequences.

        Returns:
            `tuple[Tensor, None]`: The output `(batch, part, heads, dim)`, and no attention weights.

        Raises:
            `UnsupportedError`: If the ranks cannot divide the heads equally, or the keys are not of this rank's
                positions.
        """
        name, num_ranks, heads = type(module).__name__, self.comm.num_ranks, query.shape[1]
        if not query.shape[2] == key.shape[2] == value.shape[2] == self.part:
            raise UnsupportedError(
                f"sequence_parallel: {name} attends from {query.shape[2]} positions to {key.shape[2]}, expected "
                f"{self.part} each; train without a cache and without cross-attention, or remove it"
            )
        _refuse_undivided_heads(name, heads, num_ranks)
        if kwargs.get("position_bias") is not None:
            raise UnsupportedError(f"sequence_parallel: {name} adds a bias for each pair of positions; remove it")
        self.num_attentions += 1
        _DIVIDED.add(module)
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


# The divided forward that this thread computes or recomputes.
_CURRENT = threading.local()
# Attention modules that were called in a divided forward.
_DIVIDED: WeakSet[nn.Module] = WeakSet()


def divided_forward() -> DividedForward | None:
    """Returns the divided forward that this thread computes or recomputes, or `None`."""
    return getattr(_CURRENT, "forward", None)


def _within_forward(function: Callable, block: Callable, *args, **kwargs) -> Any:
    """Calls a checkpoint function so that the backward recomputes the block inside the current divided forward."""
    forward = divided_forward()

    def compute(*inputs, **settings):
        before, _CURRENT.forward = divided_forward(), forward
        try:
            return block(*inputs, **settings)
        finally:
            _CURRENT.forward = before

    return function(compute, *args, **kwargs)


def _before_block(names: list[str], block: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Splits the arguments of a block. `names` are the parameters of its forward."""
    forward = divided_forward()
    if forward is None:
        return None
    forward.num_attentions = 0
    named = [*zip(names, args), *((f"argument {at}", args[at]) for at in range(len(names), len(args)))]
    divided = tuple(_divided(forward, block, names[0], name, value) for name, value in named)
    return divided, {name: _divided(forward, block, names[0], name, value) for name, value in kwargs.items()}


def _divided(forward: DividedForward, block: nn.Module, first: str, name: str, value: Any) -> Any:
    if name in _FOR_ATTENTION:
        return value
    if name in _POSITIONS:
        if name == "position_ids":
            forward.positions = value
        if id(value) not in forward.shared:  # all blocks receive the same object, and save its parts for backward
            forward.shared[id(value)] = value, _parts_of(forward, value, _POSITIONS[name])
        return forward.shared[id(value)][1]
    if name == first and isinstance(value, Tensor) and value.dim() == 3:
        if value.shape[1] == forward.length:
            return forward.part_of(value, 1)
        if value.shape[1] == forward.part:
            return value
    elif not any(forward.length in tensor.shape for tensor in tensors_in(value)):
        return value
    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors_in(value))
    raise UnsupportedError(
        f"sequence_parallel: {type(block).__name__} receives {name} of shape {shapes}, which cannot be split for "
        f"sequences of length {forward.length}; remove it"
    )


def _parts_of(forward: DividedForward, value: Any, dim: int) -> Any:
    """Splits the tensors in a value whose dimension `dim` has all positions."""

    def part_of(tensor: Tensor) -> Tensor:
        is_whole = tensor.dim() >= -dim and tensor.shape[dim] == forward.length
        return forward.part_of(tensor, dim) if is_whole else tensor

    return tree_map_only(Tensor, part_of, value)


def _after_block(block: nn.Module, args: tuple, output: Any) -> None:
    forward = divided_forward()
    if forward is not None and forward.num_attentions == 0:
        raise UnsupportedError(
            f"sequence_parallel: {type(block).__name__} does not use transformers' AttentionInterface, so its heads "
            "were not exchanged; remove it"
        )


def _put_exchange_around_attention() -> None:
    """Patches the lookup of attention functions in transformers, once per process. Outside of divided forwards it
    returns the original function."""
    interface = sys.modules["transformers.modeling_utils"].AttentionInterface
    former = interface.get_interface
    if hasattr(former, "exchanges_heads"):
        return

    def get_interface(registry, *args, **kwargs):
        function, forward = former(registry, *args, **kwargs), divided_forward()
        if forward is not None:
            return partial(forward.attend, function)
        return partial(_recomputed, function) if in_backward() else function

    get_interface.exchanges_heads = True  # type: ignore[attr-defined]
    interface.get_interface = get_interface


def _recomputed(function: Callable, module: nn.Module, *args, **kwargs) -> Any:
    """Raises if a block is recomputed outside of its divided forward."""
    if module in _DIVIDED:
        raise UnsupportedError(
            f"sequence_parallel: {type(module).__name__} is recomputed in backward by an unsupported checkpoint "
            "function; use model.gradient_checkpointing_enable() instead"
        )
    return function(module, *args, **kwargs)


def _refuse_undivided_heads(name: str, heads: int, num_ranks: int) -> None:
    if heads % num_ranks:
        raise UnsupportedError(
            f"sequence_parallel: {name} has {heads} heads, which {num_ranks} ranks cannot divide equally; use a "
            f"divisor of {heads}"
        )


def _repeated(tensor: Tensor, heads: int, num_ranks: int) -> Tensor:
    """Repeats the heads of keys or values until each rank gets those that its query heads need."""
    own = tensor.shape[1]
    times = lcm(own, num_ranks) // own
    if heads % (own * times):
        times = heads // own
    return tensor.repeat_interleave(times, dim=1) if times > 1 else tensor


def _shown(module: nn.Module, own: slice, num_groups: int) -> nn.Module:
    """Returns a shallow copy of an attention module with a subset of its heads."""
    shown = copy(module)
    if hasattr(module, "num_key_value_groups"):
        shown.num_key_value_groups = num_groups
    if isinstance(getattr(module, "sinks", None), Tensor):
        vars(shown)["sinks"] = module.sinks[own]  # not in `_parameters`, which the copy shares with the module
    return shown


class _HeadExchange(torch.autograd.Function):
    """An all-to-all that splits dimension 1 and concatenates along dimension 2: heads and positions before attention,
    positions and heads after it."""

    @staticmethod
    def forward(ctx, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return _exchanged(comm, 1, 2, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        return None, *_exchanged(ctx.comm, 2, 1, grads)


def _exchanged(comm: Comm, cut_dim: int, join_dim: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sends each rank its range of every tensor along `cut_dim`, and concatenates received ranges along `join_dim`.
    The number of ranks must divide the size of `cut_dim`."""
    under_way = []
    for tensor in tensors:
        given = torch.stack(tensor.chunk(comm.num_ranks, cut_dim))
        coming = torch.empty_like(given)
        under_way.append((coming, given, comm.all_to_all(coming, given, what="attention")))
    for *_, pending in under_way:
        pending.wait()
    return tuple(torch.cat(coming.unbind(0), join_dim) for coming, *_ in under_way)


def _group_loss(comm: Comm, loss: Tensor) -> Tensor:
    """Returns the sum of the losses over the ranks."""
    return _GroupTokens.apply(comm, loss.reshape(1, 1), "the loss of a sequence").sum(1).reshape(loss.shape)


class _GroupTokens(torch.autograd.Function):
    """Gathers the values of all ranks' tokens, `(batch, ranks * part)`; see [Note: the gradients of a group]."""

    @staticmethod
    def forward(ctx, comm: Comm, own: Tensor, what: str) -> Tensor:
        ctx.comm, ctx.part = comm, own.shape[1]
        if not own.is_floating_point():
            ctx.set_materialize_grads(False)
        rows = comm.all_gather_rows(own.reshape(-1), what=what)
        return torch.cat([row.view(own.shape) for row in rows], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None):
        if grad is None:
            return None, None, None
        return None, grad.narrow(1, ctx.comm.rank * ctx.part, ctx.part) * ctx.comm.num_ranks, None
