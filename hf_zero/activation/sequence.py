"""Sequence parallelism: the ranks of a group share each sequence, and each holds the activations of its part.

The ranks of a sequence group are given the same batch. The model itself embeds it and makes masks and positions, for
whole sequences. Then the first block takes this rank's part, and what follows computes on parts: each position by
itself, but for attention, which exchanges heads (`hf_zero.activation.head_exchange`). Labels are shifted before they
are divided, so that none is lost at a cut.

[Note: the gradients of a group] The loss of each rank is that of its whole batch: the sum over the ranks' parts. Its
gradient reaches a rank's part once from the loss of every rank, so that part is taken times their number. The
gradients of a parameter, averaged over all ranks, are then those of ranks that each train on the whole batch.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from hf_zero.activation.checkpointing import FLAG, put_around, take_off
from hf_zero.activation.head_exchange import (
    DIVIDED,
    AttentionLookup,
    DividedForward,
    begin_divided,
    divided_forward,
    end_divided,
    part_of_forward,
    refuse_recomputed,
    refuse_undivided_heads,
)
from hf_zero.activation.installed import Installed
from hf_zero.comm import Comm
from hf_zero.comm.bus import Transfer
from hf_zero.comm.groups import refuse_no_divisor
from hf_zero.compat import is_pretrained
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.partition import partition
from hf_zero.engine.patch import Uncopyable
from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError


IGNORED = -100  # the label of a token that does not count
# What a block is given for whole sequences, and hands to its attention.
_FOR_ATTENTION = {"attention_mask", "causal_mask", "shift_labels", "labels", "num_items_in_batch", "seq_idx"}
_FOR_ATTENTION |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
# What a block is given of each position, with the dimension of the positions.
_POSITIONS = {"position_ids": -1, "cache_position": -1}
_POSITIONS |= dict.fromkeys(("position_embeddings", "position_embeddings_global", "position_embeddings_local"), -2)
# Modules that mix positions without attention.
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
# What the ranks of a group are given alike, beside the labels.
_ALIKE = ("input_ids", "attention_mask", "position_ids")
_SCATTER = 6364136223846793005  # odd: products with it, modulo 2 ** 64, tell all values apart
# Requests of a forward whose answers would be parts, or come from parts of the router's choices.
_REQUESTS = ("output_router_logits", "output_hidden_states", "output_attentions", "logits_to_keep")
_CACHES = ("past_key_values", "cache")  # the name of a model's cache, up to transformers 5.23 and since


def refuse_undividable(model: nn.Module, num_parts: int) -> None:
    """Refuses a model whose sequences cannot be divided, as far as that is seen before a forward."""
    language_model = _language_model(model)
    name = type(language_model or model).__name__
    loss = getattr(getattr(language_model, "loss_function", None), "__name__", None)
    if loss != "ForCausalLMLoss" or language_model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"sequence_parallel: {name} is no causal language model of transformers, so it is not known how its loss "
            "adds up over positions; leave it out"
        )
    config = language_model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"sequence_parallel: {name} has an encoder and a decoder; leave it out")
    if getattr(config, "output_router_logits", False):
        raise UnsupportedError(
            f"sequence_parallel: the router's loss of {name} is no sum over positions; set "
            "model.config.output_router_logits = False, or leave it out"
        )
    if getattr(config, "layerdrop", 0):
        raise UnsupportedError(
            f"sequence_parallel: each rank would leave out other blocks of {name}; set model.config.layerdrop = 0, or "
            "leave it out"
        )
    _refuse_blocks(name, model)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        refuse_undivided_heads(name, heads, num_parts)


def refuse_group_size(num_parts: int, num_ranks: int, name: str = "sequence_parallel") -> None:
    """Refuses a number of ranks that form no equal sequence groups."""
    if num_parts < 1:
        raise ConfigError(f"{name}: {num_parts} is no number of ranks; give 1 or more")
    refuse_no_divisor(num_parts, num_ranks, name, "or start more ranks")


def _language_model(model: nn.Module) -> Any:
    """Returns the outermost model of transformers: the model itself, or the one in an adapter's."""
    return next(filter(is_pretrained, model.modules()), None)


class SequenceParallel(Installed):
    """Divides the sequences of a model's forwards with labels over the ranks of a group, until it is removed.

    Forwards without labels, such as those of `generate`, compute whole sequences on every rank.

    Args:
        comm (`Comm`): the ranks that share each sequence.

    Attributes:
        is_active (`bool`): `False` while forwards with labels, too, are to compute whole sequences.
    """

    def __init__(self, engine: ZeroEngine, comm: Comm):
        super().__init__(engine)
        self.comm = comm
        self.is_active = True
        self._model = _language_model(engine.model)
        self._parameters = list(inspect.signature(type(self._model).forward).parameters)[1:]
        self._outside: int | None = None  # the forwards that were open before the one under way
        self._digests = engine.bus.empty(1 + len(_ALIKE), torch.long)
        self._copying: Transfer  # of the digests of the forward under way
        blocks = list(engine.modules.values())
        kept = [found for module in self._model.modules() if (found := _kept_shape(module, blocks[0])) is not None]
        self._keeps_length, self._keeps_rows = bool(kept), "(-1," not in "".join(kept)
        self._checkpointed = [module for module in self._model.modules() if hasattr(module, FLAG)]
        self._handles.append(AttentionLookup())
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._end, always_call=True))
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(_BlockHook(block).before, with_kwargs=True))
            self._handles.append(block.register_forward_hook(_after_block))
        self._handles.append(blocks[-1].register_forward_hook(_after_last))

    def remove(self) -> None:
        super().remove()
        take_off(self._checkpointed, _within_forward)
        DIVIDED.difference_update(self._model.modules())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Computes whole sequences on every rank as long as the context lasts: all logits are then in the outputs."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if self._outside is not None:  # what interrupted the last forward was no exception that hooks see
            end_divided(self._outside)
        self._outside = begin_divided(None)
        given = {**dict(zip(self._parameters, args)), **kwargs}
        labels, targets = given.get("labels"), given.get("shift_labels")
        if not self.is_active or (labels is None and targets is None):
            return None
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        if targets.dim() != 2 or targets.shape[1] < 2:
            return None
        self._refuse(given)
        self._compare_shapes(given, targets)
        self._begin_digests(given, targets)
        forward = DividedForward(self.comm, targets.shape[0], targets.shape[1], self._keeps_length, self._keeps_rows)
        end_divided(self._outside)
        begin_divided(forward)
        put_around(self._checkpointed, _within_forward)
        changed = {"shift_labels": forward.rows_of(forward.part_of(targets, 1, IGNORED), IGNORED)}
        if given.get("num_items_in_batch") is None:
            changed["num_items_in_batch"] = (targets != IGNORED).sum()
        return args, {**kwargs, **changed}

    def _refuse(self, given: dict[str, Any]) -> None:
        """Refuses what a forward is asked for, where the answer would not be that of whole sequences."""
        config = self._model.config
        said = {name: given.get(name) for name in _REQUESTS}
        said = {name: getattr(config, name, None) if value is None else value for name, value in said.items()}
        asked = next((name for name, value in said.items() if value), None)
        asked = asked or next((name for name in _CACHES if given.get(name) is not None), None)
        if asked is not None:
            raise UnsupportedError(
                f"sequence_parallel: {asked} with labels needs whole sequences on each rank; leave it out, or give no "
                "labels"
            )

    def _compare_shapes(self, given: dict[str, Any], targets: Tensor) -> None:
        """Refuses batches of unlike shapes within a group, on all its ranks and in every forward: the streams of ranks
        may part at any time."""
        present = [isinstance(given.get(name), Tensor) for name in _ALIKE]
        self._refuse_unlike(torch.tensor([*targets.shape, *present]))

    def _begin_digests(self, given: dict[str, Any], targets: Tensor) -> None:
        """Begins to copy a batch's digests to the host. They are compared when the forward has been issued: the device
        has work while the host waits for them."""
        digests = [_digest(targets, targets), *(_digest(targets, given.get(name)) for name in _ALIKE)]
        self._copying = self._engine.bus.down(self._digests, torch.stack(digests))

    def _compare_digests(self) -> None:
        """Refuses batches that differ within a group, on all its ranks and in every forward."""
        self._copying.synchronize()
        del self._copying  # with what it reads
        self._refuse_unlike(self._digests)

    def _refuse_unlike(self, facts: Tensor) -> None:
        if len(self.comm.on_host.all_gather_vector(facts, what="comparing batches").unique(dim=0)) > 1:
            raise ConfigError(
                f"sequence_parallel: the {self.comm.num_ranks} ranks of a sequence group were given different "
                "batches; give neighbouring ranks the same batch, as ZeroTrainer does"
            )

    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._outside is None:  # it failed before it began
            return None
        forward = divided_forward()
        end_divided(self._outside)
        self._outside = None
        error = sys.exc_info()[1]
        if forward is not None and output is None and error is not None and not isinstance(error, HfZeroError):
            error.add_note(
                f"sequence_parallel: {type(module).__name__} was computing a part of its sequences; where the error "
                "comes of that, its attention or its loss takes whole ones: leave sequence_parallel out"
            )
        if forward is None or output is None:
            return None
        forward.shared.clear()
        self._compare_digests()
        if isinstance(output, tuple):
            return (_group_loss(self.comm, output[0]), *output[1:])
        if output.get("loss") is None:
            raise UnsupportedError(
                f"sequence_parallel: {type(module).__name__} computed no loss of the labels it was given; leave it out"
            )
        for name in _CACHES:
            if output.get(name) is not None:
                output[name] = None  # of parts
        output.loss = _group_loss(self.comm, output.loss)
        for name, value in list(output.items()):  # one value for each token: all ranks have all
            if isinstance(value, Tensor) and value.dim() == 2 and (own := forward.tokens_of(value)) is not None:
                output[name] = _GroupTokens.apply(self.comm, own, "values of tokens")[:, : forward.length]
        return output


def _refuse_blocks(name: str, model: nn.Module) -> None:
    stacks = partition(model).stacks
    if len(stacks) != 1:
        raise UnsupportedError(
            f"sequence_parallel: {name} has {len(stacks)} stacks of blocks, and the sequences of one can be divided; "
            "leave it out"
        )
    parts = [module for block in stacks[0].blocks for module in block.module.modules()]
    mixing = next((module for module in parts if isinstance(module, _MIXING)), None)
    if mixing is not None:
        raise UnsupportedError(
            f"sequence_parallel: a block of {name} mixes positions by {type(mixing).__name__}, and not by attention "
            "alone; leave it out"
        )


def _digest(like: Tensor, value: Any) -> Tensor:
    """Returns a number that depends on all values in a forward's argument and on their order, beside `like`."""
    total = torch.zeros((), dtype=torch.long, device=like.device)
    for tensor in tensors_in(value):
        values = tensor.detach().to(like.device).flatten()
        if values.is_floating_point():
            values = values.float().view(torch.int32)
        places = _SCATTER * torch.arange(1, len(values) + 1, device=like.device)
        total = total * _SCATTER + ((values.long() + 1001) * ((places ^ (places >> 31)) * _SCATTER)).sum()
    return total


class _BlockHook(Uncopyable):
    """Divides what a block is given for whole sequences."""

    def __init__(self, block: nn.Module):
        self._parameters = list(inspect.signature(type(block).forward).parameters)[1:]

    def before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        forward = divided_forward()
        if forward is None:
            refuse_recomputed(block)
            return None
        DIVIDED.add(block)
        forward.num_attentions = 0
        names = [*self._parameters[: len(args)], *(f"argument {at}" for at in range(len(self._parameters), len(args)))]
        divided = tuple(self._divided(forward, block, name, value) for name, value in zip(names, args))
        return divided, {name: self._divided(forward, block, name, value) for name, value in kwargs.items()}

    def _divided(self, forward: DividedForward, block: nn.Module, name: str, value: Any) -> Any:
        if name in _FOR_ATTENTION:
            return value
        if name in _POSITIONS:
            if name == "position_ids":
                forward.positions = value
            if id(value) not in forward.shared:  # all blocks are given the same, and keep its parts for backward
                forward.shared[id(value)] = value, _parts_of(forward, value, _POSITIONS[name])
            return forward.shared[id(value)][1]
        if name == self._parameters[0] and isinstance(value, Tensor) and value.dim() == 3:
            if value.shape[1] == forward.length:
                return forward.part_of(value, 1)
            if value.shape[1] == forward.part:
                return value
        elif not any(forward.length in tensor.shape for tensor in tensors_in(value)):
            return value
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors_in(value))
        raise UnsupportedError(
            f"sequence_parallel: {type(block).__name__} is given {name} of shape {shapes}, and it is not known how to "
            f"divide it for sequences of {forward.length}; leave it out"
        )


def _parts_of(forward: DividedForward, value: Any, dim: int) -> Any:
    """Divides the tensors in a value that have all positions along a dimension."""

    def part_of(tensor: Tensor) -> Tensor:
        is_whole = tensor.dim() >= -dim and tensor.shape[dim] == forward.length
        return forward.part_of(tensor, dim) if is_whole else tensor

    return tree_map_only(Tensor, part_of, value)


def _after_block(block: nn.Module, args: tuple, output: Any) -> None:
    forward = divided_forward()
    if forward is not None and forward.num_attentions == 0:
        raise UnsupportedError(
            f"sequence_parallel: {type(block).__name__} has not looked up its attention in transformers' "
            "AttentionInterface, so its heads were not exchanged; leave it out"
        )


def _after_last(block: nn.Module, args: tuple, output: Any) -> Any:
    forward = divided_forward()
    if forward is None or not forward.keeps_length:
        return None
    return (forward.rows_of(output[0]), *output[1:]) if isinstance(output, tuple) else forward.rows_of(output)


def _kept_shape(module: nn.Module, block: nn.Module) -> str | None:
    """Returns what the forward of the module that calls a block says of the shape that it gives to the outputs of the
    last one, as GPT-2's does: that of its inputs. `None` where it gives them none."""
    calls = any(block is each for child in module.children() if isinstance(child, nn.ModuleList) for each in child)
    source = inspect.getsource(type(module).forward) if calls else ""
    return source.partition("output_shape = ")[2].partition("\n")[0] if ".view(output_shape)" in source else None


def _within_forward(function: Callable, block: Callable, *args, **kwargs) -> Any:
    """Calls a checkpoint function. The block is computed anew in backward as a part of its forward."""
    forward = divided_forward()

    def compute(*inputs, **settings):
        with part_of_forward(forward):
            return block(*inputs, **settings)

    return function(compute, *args, **kwargs)


def _group_loss(comm: Comm, loss: Tensor) -> Tensor:
    """Returns the sum of the ranks' losses."""
    return _GroupTokens.apply(comm, loss.reshape(1, 1), "the loss of a sequence").sum(1).reshape(loss.shape)


class _GroupTokens(torch.autograd.Function):
    """The values of all ranks' tokens, `(batch, ranks * part)`; see [Note: the gradients of a group]."""

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
