"""Logits that are not computed yet: what a model's forward does with them is noted, up to the loss."""

from collections.abc import Callable
from functools import partial, partialmethod
from operator import itemgetter, methodcaller
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


# Operations on each logit by itself, which are the same on a part of the logits.
_ELEMENTWISE = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), torch.mul),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), torch.div),
    "tanh": torch.tanh,
    **{name: methodcaller(name) for name in ("float", "bfloat16", "half", "double")},
}
# What is known of logits that are not computed.
_OF_FORM = ("shape", "dtype", "ndim", "dim", "size", "numel")
_SHAPING = ("view", "reshape", "flatten", "contiguous")
_OPERATORS = (
    *("__mul__", "__rmul__", "__truediv__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__rtruediv__", "__pow__"),
    *("__matmul__", "__len__", "__iter__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"),
    *("__eq__", "__ne__", "__abs__", "__mod__", "__floordiv__"),
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"),
)


class Head(Protocol):
    """The linear module whose output is deferred."""

    def loss_of(self, logits: "DeferredLogits", targets: Tensor, smoothing: float) -> Tensor:
        """Returns the negative log-likelihood of each target, 1-D fp32; `smoothing` of it is of all words alike. What
        it returns where a target is -1 is not used."""

    def logits_of(self, hidden: Tensor, reason: str) -> Tensor:
        """Returns the logits of these hidden states."""


class DeferredLogits:
    """The output of a head that has not been called. It is no tensor, and behaves as one.

    Changes of shape are made on the hidden states, and operations on each logit are noted. `cross_entropy` computes
    the loss from these. Anything else computes the logits, in the ordinary way. From then on they are a tensor that
    may be written to, so all that is done with them is done with that tensor.

    Args:
        head (`Head`): whose output it is.
        hidden (`Tensor`): the hidden states, `(..., hidden_size)`.
        steps (`tuple`): the operations on each logit so far, each a function of one tensor.
        form (`Tensor`, *optional*): a tensor on the meta device that has the dtype of these logits and lies in memory
            as they do; by default as the head's own output.
        origin (`DeferredLogits`, *optional*): what these logits were made of; else they are the head's own output.
        make (`Callable`, *optional*): gives these logits, from those of `origin`.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        vocab_size: int,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
        form: Tensor | None = None,
        origin: "DeferredLogits | None" = None,
        make: Callable[[Tensor], Tensor] = lambda whole: whole,
    ):
        self.hidden = hidden
        self.steps = steps
        self.device = hidden.device
        self._head = head
        if form is None:
            with _disable_current_modes():  # what counts operations and their memory is not to count these
                form = torch.empty(*hidden.shape[:-1], vocab_size, dtype=hidden.dtype, device="meta")
        self._form = form
        self._origin = origin
        self._make = make
        self._is_view = origin is not None and torch._C._is_alias_of(form, origin._form)
        self._has_grad = torch.is_grad_enabled()  # the mode in which a plain head would have computed them
        self._whole: Tensor | None = None  # once it was needed, and unless they share the memory of others

    def whole(self, reason: str) -> Tensor:
        """Returns the logits, which are computed by the head in the ordinary way; `reason` is the operation that needs
        them."""
        with torch.set_grad_enabled(self._has_grad):
            if self._is_view:
                return self._make(self._origin.whole(reason))  # type: ignore[union-attr]
            if self._whole is None:
                self._whole, self._origin = self._computed(reason), None
            return self._whole

    def _computed(self, reason: str) -> Tensor:
        if self._origin is not None and not self._origin.is_whole:
            return self._make(self._origin.whole(reason))
        whole = self._head.logits_of(self.hidden, reason)  # the origin may have been written to since
        for step in self.steps:
            whole = step(whole)
        return whole

    @property
    def is_whole(self) -> bool:
        """Whether the logits were computed, so that they may have been written to."""
        return self._origin.is_whole if self._is_view else self._whole is not None  # type: ignore[union-attr]

    def _formed(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what an operation makes of the form of these logits."""
        with _disable_current_modes():
            return make(self._form)

    def _then(self, make: Callable[[Tensor], Tensor], form: Tensor, **changed: Any) -> "DeferredLogits":
        """Returns the logits after one more operation."""
        if form is self._form:
            return self
        kept = {"hidden": self.hidden, "steps": self.steps, **changed}
        return type(self)(self._head, vocab_size=form.shape[-1], form=form, origin=self, make=make, **kept)

    def _elementwise(self, name: str, args: tuple) -> "DeferredLogits | None":
        """Notes an operation on each logit. Returns `None` where it is not one."""
        if self.is_whole or any(not isinstance(arg, (int, float)) for arg in args):
            return None
        function = _ELEMENTWISE[name]
        return self._stepped(lambda logits: function(logits, *args))

    def _stepped(self, step: Callable[[Tensor], Tensor]) -> "DeferredLogits":
        return self._then(step, self._formed(step), steps=(*self.steps, step))

    def _placed(
        self, make: Callable[[Tensor], Tensor], place: Callable[[Tensor, torch.Size], Tensor]
    ) -> "DeferredLogits | None":
        """Changes the shape, or chooses positions, where the vocabulary stays whole and the last dimension; else
        returns `None`.

        Args:
            make (`Callable`): does it with the logits.
            place (`Callable`): does the same with the hidden states, given the new shape of the positions.
        """
        form = None if self.is_whole else self._formed(make)
        if form is None or form.shape[-1:] != self.shape[-1:]:
            return None
        hidden = place(self.hidden, form.shape[:-1])
        if hidden.shape != (*form.shape[:-1], self.hidden.shape[-1]):
            return None
        return self._then(make, form, hidden=hidden)

    def to(self, *args, **kwargs):
        """Casts as `Tensor.to` does. The device is the head's."""
        given = [*args, *kwargs.values()]
        dtypes = [arg for arg in given if isinstance(arg, torch.dtype)]
        others = [arg for arg in given if not isinstance(arg, torch.dtype)]
        stays = all(isinstance(arg, (str, torch.device)) and torch.device(arg) == self.device for arg in others)
        if stays and not self.is_whole:
            return self._stepped(methodcaller("to", dtypes[0])) if dtypes else self
        return self.whole("to").to(*args, **kwargs)

    def __getitem__(self, index):
        if isinstance(index, Tensor) and index.dtype is torch.bool and index.dim() < self.dim() and not self.is_whole:
            hidden = self.hidden[index]  # of the chosen positions
            with _disable_current_modes():
                form = self._form.new_empty(*hidden.shape[:-1], self.shape[-1])
            return self._then(itemgetter(index), form, hidden=hidden)
        parts = index if isinstance(index, tuple) else (index,)
        deferred = None
        if all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts):
            deferred = self._placed(itemgetter(index), lambda hidden, _: hidden[index])
        return self.whole("[]")[index] if deferred is None else deferred

    def __getattr__(self, name: str):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _OF_FORM:
            return getattr(self._form, name)
        if name in _SHAPING or name in _ELEMENTWISE:
            return partial(self._call, name)
        return getattr(self.whole(name), name)

    def _call(self, name: str, *args, **kwargs):
        """Does what the method of this name does, on the logits themselves where it is not one that is noted."""
        deferred = None
        if name in _SHAPING:
            make = methodcaller(name, *args, **kwargs)
            deferred = self._placed(make, lambda hidden, shape: hidden.reshape(*shape, hidden.shape[-1]))
        elif not kwargs and name in _ELEMENTWISE:
            deferred = self._elementwise(name, args)
        return getattr(self.whole(name), name)(*args, **kwargs) if deferred is None else deferred

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits, name = args[0] if args else None, getattr(function, "__name__", str(function))
        if isinstance(logits, DeferredLogits):
            if function is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
                return loss
            if name in _ELEMENTWISE and not kwargs and (done := logits._elementwise(name, args[1:])) is not None:
                return done
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.whole(name), (tuple(args), kwargs))
        return function(*args, **kwargs)


for _operator in _OPERATORS:  # python looks for these on the class alone
    setattr(DeferredLogits, _operator, partialmethod(DeferredLogits._call, _operator))
DeferredLogits.__hash__ = Tensor.__hash__  # type: ignore[method-assign, assignment]


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Returns the loss of deferred logits, or `None` where it needs them whole."""
    is_known = weight is None and size_average is None and reduce is None
    if not is_known or logits.is_whole:
        return None
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return None
    counts = target != ignore_index
    torch._assert_async(
        (~counts | ((target >= 0) & (target < logits.shape[-1]))).all(),
        f"a label is neither {ignore_index} nor one of the {logits.shape[-1]} tokens of the vocabulary",
    )
    losses = logits._head.loss_of(logits, target.masked_fill(~counts, -1), label_smoothing).masked_fill(~counts, 0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / counts.sum()
    return losses.to(logits.dtype)
