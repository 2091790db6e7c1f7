"""The loss of a language model from its hidden states, a part of the vocabulary at a time.

The logits of all tokens at once are often the largest tensor of a step: with their gradient, 8 bytes for each token
and word of the vocabulary. Here they exist for a range of the vocabulary at a time. The forward takes the sum over the
vocabulary that the softmax needs, and the backward computes each range again (Cut Cross-Entropy, arXiv 2411.09009).
The gradient of a range of the head's rows is one matrix product over all tokens, written where it is reduced; no row
is added to, so nothing is rounded more often than in the plain loss.

[Note: where the loss is found] The model's own forward computes its loss. While it has labels, its head returns
`DeferredLogits`, which take note of what is done with them, such as a scale or soft-capping. When these come to
`cross_entropy`, the head is called again, and now returns the loss of each token. So hooks on the head, which bring
its weight, run around the computation that uses it.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.activation.deferred_logits import DeferredLogits
from hf_zero.engine.direct import autocast_dtype
from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.engine import DOUBLE_BACKWARD, ZeroEngine
from hf_zero.engine.partition import vocabulary_module
from hf_zero.engine.patch import Patch, Uncopyable
from hf_zero.errors import UnsupportedError


logger = logging.getLogger(__name__)

# The bytes of a range's logits: on CPUs so few that they stay in a cache; on accelerators enough for large products.
CPU_NBYTES = 4 * 2**20
ACCELERATOR_NBYTES = 128 * 2**20
# Narrower ranges make slow products.
MIN_WIDTH = 256


def find_head(model: nn.Module) -> tuple[nn.Linear, list[nn.Module]] | None:
    """Returns a model's head, and the modules that call it their output embeddings, the outermost first; `None` where
    the model has no head that is one plain linear module."""
    owners: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if not hasattr(type(module), "get_output_embeddings"):
            continue
        head = vocabulary_module(module, "get_output_embeddings")
        if type(head) is nn.Linear and not is_dtensor(head.weight):
            owners[module] = head
    heads = list({id(head): head for head in owners.values()}.values())
    return (heads[0], list(owners)) if len(heads) == 1 else None  # type: ignore[return-value]


class ChunkedLoss(Uncopyable):
    """Computes the loss of a model from its hidden states, until it is removed.

    Args:
        head (`nn.Linear`): whose output are the logits.
        owners (`list[nn.Module]`): the modules whose forward may be given labels.
        is_auto (`bool`): only where the logits would take more than the largest block, and only if nothing else needs
            them; else always, and what needs the logits is refused.

    Attributes:
        is_active (`bool`): set it to `False` while logits are wanted.
    """

    def __init__(self, engine: ZeroEngine, head: nn.Linear, owners: list[nn.Module], is_auto: bool):
        self.is_active = True
        self._engine = engine
        self._head = head
        self._is_auto = is_auto
        self._outermost = owners[0] if owners else None
        self._depth = 0  # how many forwards with labels are under way
        self._wanted: tuple[DeferredLogits, Tensor] | None = None  # what the head is to compute the loss of
        self._is_told = False
        self._max_nbytes = _largest_block_nbytes(engine, head.out_features)
        self._sink = engine.sinks.get(id(head.weight))
        self._own_hooks = _num_hooks(head)
        self._former = head.forward
        self._patches: list[Any] = [
            # what `__call__` calls in place of the hooks and the forward
            Patch(head, "_compiled_call_impl", self._call),
            Patch(head, "forward", self._forward),
        ]
        for owner in owners:
            at = _place_of_labels(owner)
            self._patches.append(owner.register_forward_pre_hook(partial(self._begin, at), with_kwargs=True))
            self._patches.append(
                owner.register_forward_hook(partial(self._end, at), with_kwargs=True, always_call=True)
            )

    def remove(self) -> None:
        """Gives the head its own forward back."""
        while self._patches:
            self._patches.pop().remove()

    def _begin(self, at: int | None, module, args, kwargs) -> None:
        if module is self._outermost:
            self._depth = 0  # the last forward may have been interrupted
        self._depth += _has_labels(at, args, kwargs)

    def _end(self, at: int | None, _module, args, kwargs, _output) -> None:
        # this comes after a forward too that another hook refused before `_begin`
        self._depth = max(0, self._depth - _has_labels(at, args, kwargs))

    def _call(self, *args, **kwargs):
        """Calls the head, or defers that."""
        if self._wanted is None and self._depth and self.is_active and len(args) == 1 and not kwargs:
            if self._is_worth_it(args[0]) and self._is_served(args[0]):
                return DeferredLogits(self, args[0], self._head.out_features)
        return self._head._call_impl(*args, **kwargs)

    def _is_worth_it(self, hidden: Tensor) -> bool:
        nbytes = hidden.shape[:-1].numel() * self._head.out_features * 4
        return not self._is_auto or nbytes > max(self._max_nbytes, self._chunk_nbytes)

    def _is_served(self, hidden: Tensor) -> bool:
        """Whether the head's output can be deferred; what stands in the way is told."""
        reason = None
        if _num_hooks(self._head) != self._own_hooks:
            reason = "a hook on its head, which sees the logits"
        elif torch.compiler.is_compiling():
            reason = "its head is compiled"
        elif autocast_dtype(hidden.device.type) is not None:
            reason = "autocast, which casts at each use"
        if reason is not None:
            self._tell(reason)
        return reason is None

    @property
    def _chunk_nbytes(self) -> int:
        return CPU_NBYTES if self._engine.comm.is_on_cpu else ACCELERATOR_NBYTES

    def _forward(self, hidden: Tensor) -> Tensor:
        """The head's forward: its output, or the loss that is wanted."""
        if self._wanted is None:
            return self._former(hidden)
        logits, targets = self._wanted
        num_tokens = max(1, hidden.shape[0])
        width = max(MIN_WIDTH, self._chunk_nbytes // (4 * num_tokens))
        sink = self._sink
        if sink is not None and not sink.serves(self._head.weight, hidden):
            sink = None
        return _Loss.apply(hidden, self._head.weight, self._head.bias, targets, logits.steps, width, sink)

    def loss_of(self, logits: DeferredLogits, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of each target, fp32 `(num_tokens,)`.

        Args:
            logits (`DeferredLogits`): of shape `(num_tokens, vocab_size)`.
            targets (`Tensor`): int64 `(num_tokens,)`, each a token of the vocabulary.
        """
        self._wanted = logits, targets
        try:
            return self._head._call_impl(logits.hidden)
        finally:
            self._wanted = None

    def logits_of(self, hidden: Tensor, reason: str) -> Tensor:
        """Returns the logits, since something else than the loss needs them.

        Raises:
            `UnsupportedError`: when they were never to be computed, or the forward has ended: the head's weight may
                have changed, and the other ranks may not gather it.
        """
        if not self._depth:
            raise UnsupportedError(
                f"chunked_loss: logits of {type(self._engine.model).__name__} are read ({reason}) when its forward "
                "has ended, which computed the loss without them; set chunked_loss to off"
            )
        self._tell(f"{reason}, which needs them whole")
        return self._head._call_impl(hidden)

    def _tell(self, reason: str) -> None:
        """Refuses what needs the logits, or says once that they are computed."""
        text = f"chunked_loss: {type(self._engine.model).__name__} does more with its logits than the loss: {reason}"
        if not self._is_auto:
            raise UnsupportedError(f"{text}; leave chunked_loss out")
        if not self._is_told:
            self._is_told = True
            logger.warning("hf_zero: %s; all are computed at once", text)

    @contextmanager
    def active(self, is_active: bool) -> Iterator[None]:
        """Computes losses this way inside the context, or does not."""
        before, self.is_active = self.is_active, is_active
        try:
            yield
        finally:
            self.is_active = before


def _num_hooks(head: nn.Module) -> int:
    forward, backward = ("_forward_pre_hooks", "_forward_hooks"), ("_backward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(head, name)) for name in (*forward, *backward))


def _largest_block_nbytes(engine: ZeroEngine, vocab_size: int) -> int:
    """Returns the bytes of the largest block's parameters in the dtype that computes. It is the same at all stages
    and on any number of ranks."""
    sizes = [0]
    for unit in engine.blocks:
        params = [param for flat in unit.flats for param in flat.params]
        if not any(param.shape[:1] == (vocab_size,) for param in params):  # an embedding is no block
            sizes.append(sum(param.numel() * param.element_size() for param in params))
    return max(sizes)


def _place_of_labels(owner: nn.Module) -> int | None:
    names = list(inspect.signature(owner.forward).parameters)
    return names.index("labels") if "labels" in names else None


def _has_labels(at: int | None, args: tuple, kwargs: dict) -> bool:
    given = args[at] if at is not None and at < len(args) else kwargs.get("labels")
    return given is not None


class _Loss(torch.autograd.Function):
    """The negative log-likelihood of each target under `softmax(steps(hidden @ weight.t() + bias))`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, steps, width, sink):
        ctx.steps, ctx.width, ctx.sink = steps, width, sink
        tiles = Tiles(hidden, weight, bias, width)
        largest = hidden.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        summed, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
        for rows in tiles.ranges():
            logits = _stepped(tiles.logits(rows), steps).float()
            place, is_here = _place_in(targets, rows)
            chosen = torch.where(is_here, logits.gather(1, place[:, None])[:, 0], chosen)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            summed.mul_((before - largest).exp_()).add_(logits.sub_(largest[:, None]).exp_().sum(1))
        log_sum = largest + summed.log()
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        return log_sum - chosen

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise UnsupportedError(DOUBLE_BACKWARD)
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        returned, destination, is_filled = None, None, False
        if needs_weight and ctx.sink is not None and ctx.sink.is_open():
            destination, is_filled = ctx.sink.destination()
        elif needs_weight:
            returned = destination = torch.empty_like(weight)
        tiles = Tiles(hidden, weight, bias, ctx.width)
        for rows in tiles.ranges():
            grad_logits = _grad_logits(tiles.logits(rows), ctx.steps, targets, rows, log_sum, grad)
            if needs_hidden:
                _add_product(grad_hidden, grad_logits, weight[rows])
            if needs_bias:
                torch.sum(grad_logits, 0, out=grad_bias[rows])
            if is_filled:
                destination[rows].addmm_(grad_logits.t(), hidden)
            elif needs_weight:
                torch.mm(grad_logits.t(), hidden, out=destination[rows])
        grad_hidden = grad_hidden.to(hidden.dtype) if needs_hidden else None
        return grad_hidden, returned, grad_bias, None, None, None, None


class Tiles:
    """The logits of all tokens for one range of the vocabulary after the other, in the same memory.

    Args:
        hidden (`Tensor`): `(num_tokens, hidden_size)`.
        weight (`Tensor`): `(vocab_size, hidden_size)`.
        bias (`Tensor`, *optional*): `(vocab_size,)`.
        width (`int`): of a range.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, width: int):
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._width = min(width, len(weight))
        self._memory = hidden.new_empty(len(hidden) * self._width)

    def ranges(self) -> Iterator[slice]:
        """Returns the ranges of the vocabulary."""
        size = len(self._weight)
        return (slice(start, min(start + self._width, size)) for start in range(0, size, self._width))

    def logits(self, rows: slice) -> Tensor:
        """Returns the logits of one range. The next call overwrites them."""
        num_tokens, width = len(self._hidden), rows.stop - rows.start
        out = self._memory[: num_tokens * width].view(num_tokens, width)
        if self._bias is None:
            return torch.mm(self._hidden, self._weight[rows].t(), out=out)
        return torch.addmm(self._bias[rows], self._hidden, self._weight[rows].t(), out=out)


def _place_in(targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns where each target is in a range of the vocabulary, and whether it is there at all."""
    is_here = (targets >= rows.start) & (targets < rows.stop)
    return (targets - rows.start).clamp_(0, rows.stop - rows.start - 1), is_here


def _grad_logits(logits: Tensor, steps, targets: Tensor, rows: slice, log_sum: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient with respect to one range of the head's output, over which it may be written."""
    inputs = logits
    if steps:
        inputs = logits.detach().requires_grad_()
        with torch.enable_grad():
            logits = _stepped(inputs, steps)
    outputs = logits.detach()
    # autograd may have kept what the steps gave
    grads = torch.sub(outputs, log_sum[:, None]) if steps else outputs.float().sub_(log_sum[:, None])
    grads.exp_().mul_(grad[:, None])
    place, is_here = _place_in(targets, rows)
    grads.scatter_add_(1, place[:, None], torch.where(is_here, -grad, 0.0)[:, None])
    if not steps:
        return grads.to(inputs.dtype)
    return torch.autograd.grad(logits, inputs, grads.to(logits.dtype))[0]


def _stepped(logits: Tensor, steps) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
