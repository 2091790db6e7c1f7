"""The loss of a language model from its hidden states, a part of the vocabulary at a time.

The logits of all tokens at once are often the largest tensor of a step: with their gradient, 8 bytes for each token
and word of the vocabulary. Here they exist for a range of the vocabulary at a time. The forward takes the sum over the
vocabulary that the softmax needs, and the backward computes each range again (Cut Cross-Entropy, arXiv 2411.09009).
The gradient of a range of the head's rows is one matrix product over all tokens, written where it is reduced; no row
is added to, so nothing is rounded more often than in the plain loss.

[Note: where the loss is found] The model's own forward computes its loss. While it has labels, its head returns
`DeferredLogits`, which take note of what is done with them, such as a scale or soft-capping. When these come to
`cross_entropy`, the head is called again, and now returns the loss of each token. So hooks on the head, which bring
its weight, run around the computation that uses it. A loss that a trainer computes from the logits of a forward
without labels is computed at the end of that forward, where the weights are there (`reading`).
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hf_zero.activation.deferred_logits import DeferredLogits
from hf_zero.activation.installed import Installed
from hf_zero.activation.vocabulary_ranges import Ranges, Steps, TokenLoss
from hf_zero.engine.direct import autocast_dtype
from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.partition import vocabulary_module
from hf_zero.engine.patch import Patch
from hf_zero.errors import UnsupportedError


logger = logging.getLogger(__name__)

# The bytes of a range's logits: on CPUs so few that they stay in a cache; on accelerators enough for large products.
CPU_NBYTES = 4 * 2**20
ACCELERATOR_NBYTES = 128 * 2**20
# Narrower ranges make slow products.
MIN_WIDTH = 256

_OF_WEIGHTS: WeakValueDictionary[int, "ChunkedLoss"] = WeakValueDictionary()  # by the `id` of a head's weight


def find_head(model: nn.Module) -> tuple[nn.Linear, list[nn.Module]] | None:
    """Returns a model's head, and the modules around it whose forward may be given labels, the outermost first; `None`
    where the model has no head that is one plain linear module."""
    modules = [module for module in model.modules() if hasattr(type(module), "get_output_embeddings")]
    found = {module: vocabulary_module(module, "get_output_embeddings") for module in modules}
    heads = {id(head): head for head in found.values() if type(head) is nn.Linear and not is_dtensor(head.weight)}
    if len(heads) != 1:
        return None
    [head] = heads.values()
    around = [each for each in model.modules() if found.get(each) is head or head in set(each.modules())]
    return head, [each for each in around if each in found or _place_of_labels(each) is not None]


def of_weight(weight: Tensor) -> "ChunkedLoss | None":
    """Returns what computes losses from a head's weight a part of the vocabulary at a time; `None` where nothing
    does."""
    found = _OF_WEIGHTS.get(id(weight))
    if found is not None:
        found._is_asked = True
    return found


class ChunkedLoss(Installed):
    """Computes the loss of a model from its hidden states, until it is removed.

    Args:
        head (`nn.Linear`): whose output are the logits.
        owners (`list[nn.Module]`): the modules whose forward may be given labels.
        is_auto (`bool`): only where the logits would take more than the largest block, and only if nothing else needs
            them; else always, and what needs the logits is refused.

    Attributes:
        is_active (`bool`): set it to `False` while logits are wanted.
        is_auto (`bool`): as it was given.
    """

    def __init__(self, engine: ZeroEngine, head: nn.Linear, owners: list[nn.Module], is_auto: bool):
        super().__init__(engine)
        self.is_active = True
        self._head = head
        self.is_auto = is_auto
        self._outermost = owners[0] if owners else None
        self._depth = 0  # how many forwards with labels are under way
        self._is_asked = False  # whether the head was called in the outermost, or its weight asked for
        self._wanted: tuple[Tensor, Ranges] | None = None  # the targets of which the head is to compute the loss
        self._read: Callable[..., Any] | None = None  # what takes the logits of forwards without labels
        self._is_told = False
        self._max_nbytes = _largest_block_nbytes(engine, head.out_features)
        self._sink = engine.sinks.get(id(head.weight))
        _OF_WEIGHTS[id(head.weight)] = self
        self._own_hooks = _num_hooks(head)
        self._former = head.forward
        # what `__call__` calls in place of the hooks and the forward
        self._handles += [Patch(head, "_compiled_call_impl", self._call), Patch(head, "forward", self._forward)]
        for owner in owners:
            begin, end = (partial(each, _place_of_labels(owner)) for each in (self._begin, self._end))
            self._handles.append(owner.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(owner.register_forward_hook(end, with_kwargs=True, always_call=True))
        if owners:  # before the engine's hook, which lets the weights go
            self._handles.append(owners[0].register_forward_hook(self._hand_over, prepend=True, with_kwargs=True))

    def remove(self) -> None:
        """Gives the head its own forward back."""
        _OF_WEIGHTS.pop(id(self._head.weight), None)
        super().remove()

    def _begin(self, at: int | None, module, args, kwargs) -> None:
        if module is self._outermost:
            self._depth, self._is_asked = 0, False  # the last forward may have been interrupted
        self._depth += self._has_loss(module, at, args, kwargs)

    def _end(self, at: int | None, module, args, kwargs, output) -> None:
        # this comes after a forward too that another hook refused before `_begin`
        self._depth = max(0, self._depth - self._has_loss(module, at, args, kwargs))
        is_due = self.is_active and not self.is_auto and self._read is None and output is not None
        if is_due and module is self._outermost and not self._is_asked and _has_labels(at, args, kwargs):
            self._tell("they are computed without a call of its head")

    def _has_loss(self, module: nn.Module, at: int | None, args: tuple, kwargs: dict) -> bool:
        return _has_labels(at, args, kwargs) or (self._read is not None and module is self._outermost)

    def _hand_over(self, _module, args, kwargs, output):
        """Gives the logits of the outermost forward to who reads them, and the caller what they are then."""
        if self._read is None:
            return None
        logits = output.get("logits") if isinstance(output, dict) else None
        found = None
        if isinstance(logits, DeferredLogits) and not logits.is_whole:
            found = self._read(logits, args, kwargs)
        if found is not None:
            output["logits"] = found
        return tree_map_only(DeferredLogits, lambda each: each.whole("outputs without a loss"), output)

    def _call(self, *args, **kwargs):
        """Calls the head, or defers that."""
        self._is_asked = True
        if self._wanted is None and self._depth and self.is_active and len(args) == 1 and not kwargs:
            if self._is_worth_it(args[0]) and self._is_served(args[0]):
                return DeferredLogits(self, args[0], self._head.out_features)
        return self._head._call_impl(*args, **kwargs)

    def _is_worth_it(self, hidden: Tensor) -> bool:
        nbytes = hidden.shape[:-1].numel() * self._head.out_features * 4
        return not self.is_auto or nbytes > max(self._max_nbytes, self._chunk_nbytes)

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

    def _forward(self, hidden: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """The head's forward: its output, or the results of `TokenLoss` that are wanted."""
        if self._wanted is None:
            return self._former(hidden)
        targets, how = self._wanted
        return TokenLoss.apply(hidden, self._head.weight, self._head.bias, targets, how)

    def _ranges(self, hidden: Tensor, steps: Steps, wanted: tuple[str, ...] = (), smoothing: float = 0.0) -> Ranges:
        width = max(MIN_WIDTH, self._chunk_nbytes // (4 * max(1, hidden.shape[0])))
        is_sunk = self._sink is not None and self._sink.serves(self._head.weight, hidden)
        return Ranges(width, steps, self._sink if is_sunk else None, wanted, smoothing)

    def takes(self, weight: Tensor, hidden: Tensor) -> bool:
        """Whether `statistics_of` is to be used for hidden states `(num_tokens, hidden_size)`: not for a weight in
        place of the head's, nor for a product in another dtype."""
        is_plain = weight is self._head.weight and hidden.dtype is weight.dtype and not torch.compiler.is_compiling()
        return is_plain and autocast_dtype(hidden.device.type) is None and self._is_worth_it(hidden)

    def statistics_of(self, hidden: Tensor, targets: Tensor, steps: Steps, wanted: tuple[str, ...]) -> tuple:
        """Returns the negative log-likelihood of each target and the `STATISTICS` of each token, for a loss that reads
        the head's weight behind the blocks, without a call of the head.

        Args:
            hidden (`Tensor`): `(num_tokens, hidden_size)`.
            targets (`Tensor`): int64 `(num_tokens,)`, each a token of the vocabulary.
            steps (`tuple`): the operations on each logit.
            wanted (`tuple[str, ...]`): those of `STATISTICS` that are not `None`.
        """
        how = self._ranges(hidden, steps, wanted)
        return TokenLoss.apply(hidden, self._head.weight, self._head.bias, targets, how)

    def loss_of(self, logits: DeferredLogits, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Returns the negative log-likelihood of each target, fp32 `(num_tokens,)`.

        Args:
            logits (`DeferredLogits`): of shape `(num_tokens, vocab_size)`.
            targets (`Tensor`): int64 `(num_tokens,)`, each a token of the vocabulary, or -1 for none.
            smoothing (`float`): how much of the loss is of all words alike.
        """
        return self._results(logits, targets, smoothing=smoothing)[0]

    def _results(self, logits: DeferredLogits, targets: Tensor, **wanted: Any) -> tuple:
        """Calls the head for the results of `TokenLoss`."""
        self._wanted = targets, self._ranges(logits.hidden, logits.steps, **wanted)
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
        if not self.is_auto:
            raise UnsupportedError(f"{text}; leave chunked_loss out")
        if not self._is_told:
            self._is_told = True
            logger.warning("hf_zero: %s; all are computed at once", text)

    @contextmanager
    def reading(self, read: Callable[[DeferredLogits, tuple, dict], Any]) -> Iterator[None]:
        """Inside the context, logits of forwards without labels are given to `read` before the forward ends, together
        with its arguments. What it returns takes the place of the logits; with `None` they are computed."""
        before, self._read = self._read, read
        try:
            with self.active(True):
                yield
        finally:
            self._read = before

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
