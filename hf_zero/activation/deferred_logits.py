"""Logits that are not computed yet: operations on them are recorded up to the loss."""

from operator import methodcaller
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hf_zero.activation.vocabulary_ranges import Steps
from hf_zero.errors import UnsupportedError


if TYPE_CHECKING:
    from hf_zero.activation.chunked_loss import ChunkedLoss

# Attributes that are known without computing the logits.
_ATTRIBUTES = (
    "shape",
    "dtype",
    "ndim",
    "layout",
    "requires_grad",
    "grad_fn",
    "is_leaf",
    "_base",
    "_version",
    "is_meta",
)
_KNOWN = {getattr(torch._C.TensorBase, name).__get__ for name in _ATTRIBUTES}
_KNOWN |= {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_inference}
# Elementwise operations with numbers, which can be applied to a range of the logits.
_ELEMENTWISE = {"mul": torch.mul, "div": torch.div, "true_divide": torch.div, "tanh": torch.tanh}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_SHAPING = ("view", "reshape", "flatten", "contiguous")


class DeferredLogits(Tensor):
    """The output of a head that has not been called yet.

    Reshapes are applied to the hidden states, and elementwise operations are recorded. `cross_entropy` computes the
    loss from both. All other operations compute the logits first.

    Args:
        chunked (`ChunkedLoss`): Computes the loss or the logits.
        hidden (`Tensor`): The hidden states, `(..., hidden_size)`.
        shape (`tuple`): Shape of the logits, `(..., vocab_size)`.
        dtype (`torch.dtype`): Dtype of the logits.
        steps (`tuple`): The elementwise operations so far, each a function of one tensor.
    """

    @staticmethod
    def __new__(cls, chunked: "ChunkedLoss", hidden: Tensor, shape, dtype: torch.dtype, steps: Steps = ()):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)

    def __init__(self, chunked: "ChunkedLoss", hidden: Tensor, shape, dtype: torch.dtype, steps: Steps = ()):
        self._chunked = chunked
        self._hidden = hidden
        self._steps = steps
        self._has_grad = torch.is_grad_enabled()  # the mode of the head's call
        self._has_views = False  # has views or is one
        self._whole: Tensor | None = None  # the logits, once they are computed

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def __repr__(self, **_) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedError(f"chunked_loss: {func} reads logits; set chunked_loss to off")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits, name = args[0] if args else None, getattr(func, "__name__", str(func))
        if isinstance(logits, cls) and logits._whole is None:
            if func in _KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if (found := logits._deferred(func, name, args[1:], kwargs)) is not None:
                return found
            is_write = name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))
            if is_write and logits._has_views:
                raise UnsupportedError(
                    f"chunked_loss: {name} writes to logits that have views; set chunked_loss to off"
                )
        args, kwargs = tree_map_only(cls, lambda each: each._computed(name), (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _computed(self, reason: str) -> Tensor:
        """Returns the logits. `reason` is the operation that needs them."""
        if self._whole is None:
            with torch.set_grad_enabled(self._has_grad):
                whole = self._chunked.logits_of(self._hidden, reason)
                for step in self._steps:
                    whole = step(whole)
            self._whole = whole
        return self._whole

    def _deferred(self, func, name: str, args: tuple, kwargs: dict) -> Tensor | None:
        """Records an operation or computes the loss. Returns `None` if the operation needs the logits."""
        if func is F.cross_entropy:
            return self._loss(*args, **kwargs)
        if name in _SHAPING or name == "__getitem__":
            return self._placed(func, args, kwargs)
        if kwargs:
            return None
        if name in _ELEMENTWISE and all(isinstance(arg, (int, float)) for arg in args):
            function = _ELEMENTWISE[name]
            return self._with(step=lambda logits: function(logits, *args))
        if name in _CASTS and not args:
            return self._cast(_CASTS[name])
        if name == "to":
            dtypes = [arg for arg in args if isinstance(arg, torch.dtype)]
            devices = [arg for arg in args if isinstance(arg, (str, torch.device))]
            if len(dtypes) + len(devices) == len(args) and all(torch.device(each) == self.device for each in devices):
                return self._cast(dtypes[0] if dtypes else self.dtype)
        return None

    def _cast(self, dtype: torch.dtype) -> "DeferredLogits":
        return self if dtype is self.dtype else self._with(step=methodcaller("to", dtype), dtype=dtype)

    def _placed(self, func, args: tuple, kwargs: dict) -> "DeferredLogits | None":
        """Applies a reshape or a selection of positions, if it does not change the vocabulary dimension."""
        if func is Tensor.__getitem__:
            parts = args[0] if isinstance(args[0], tuple) else (args[0],)
            if isinstance(args[0], Tensor) and args[0].dtype is torch.bool and args[0].dim() < self.dim():
                hidden = self._hidden[args[0]]  # the selected positions
                return self._with(hidden=hidden, shape=(*hidden.shape[:-1], self.shape[-1]))
            if not all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts):
                return None
        with _disable_current_modes():  # hide from modes that count operations or memory
            shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
        if shape[-1:] != self.shape[-1:]:
            return None
        if func is Tensor.__getitem__:
            hidden = self._hidden[args[0]]
        else:
            hidden = self._hidden.reshape(*shape[:-1], self._hidden.shape[-1])
        if hidden.shape != (*shape[:-1], self._hidden.shape[-1]):
            return None
        placed = self._with(hidden=hidden, shape=shape)
        placed._has_views = self._has_views = True
        return placed

    def _with(self, hidden=None, shape=None, dtype=None, step=None) -> "DeferredLogits":
        """Returns a copy with changed fields or one more operation."""
        hidden = self._hidden if hidden is None else hidden
        steps = self._steps if step is None else (*self._steps, step)
        return DeferredLogits(self._chunked, hidden, shape or self.shape, dtype or self.dtype, steps)

    def _loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Returns the loss, or `None` if its options need the logits."""
        if weight is not None or size_average is not None or reduce is not None or label_smoothing:
            return None
        if self.dim() != 2 or target.shape != self.shape[:1] or target.is_floating_point():
            return None
        counts = target != ignore_index
        torch._assert_async(
            (~counts | ((target >= 0) & (target < self.shape[-1]))).all(),
            f"a label is neither {ignore_index} nor a token of the vocabulary of size {self.shape[-1]}",
        )
        targets = target.masked_fill(~counts, -1)
        losses = self._chunked.loss_of(self._hidden, targets, self._steps).masked_fill(~counts, 0)
        if reduction != "none":
            losses = losses.sum()
        if reduction == "mean":
            losses = losses / counts.sum()
        return losses.to(self.dtype)
