"""A warning for code that reads `param.grad` between a backward and the optimizer's step. Plain torch has the gradient
there; hf_zero has `None`, since gradients lie in buffers of its own, summed over the ranks."""

import warnings
from collections.abc import Iterable
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.engine.away import ON_GRAD_READ, AwayParameter
from hf_zero.engine.flat import Flat


MESSAGE = (
    "a parameter's .grad is None between backward and step: hf_zero keeps gradients in buffers of its own. To read or "
    "change the gradient of this rank, call param.register_hook(...) before the backward; to read the averaged "
    "gradient, call sharded.full_grad(name) after it, on all ranks. (This warning is shown once.)"
)


def grad_of(param: Tensor) -> Tensor | None:
    """Reads `param.grad` for hf_zero itself, without a warning."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.grad.__get__(param)  # type: ignore[attr-defined]


class GradientReads:
    """Watches parameters from the end of a backward until the next forward, backward or step. The first read of
    `.grad` warns and ends the watch for good. A watched parameter has a class that differs in `grad` alone, so nothing
    else gets slower; one whose values are away has a class of its own anyway."""

    def __init__(self) -> None:
        self._watched: list[nn.Parameter] = []
        self._classes: dict[type, type] = {}  # that a parameter has while it is watched, by its own
        self._has_warned = False

    def watch(self, flats: Iterable[Flat]) -> None:
        """Begins to watch the parameters of buffers."""
        if self._has_warned:
            return
        for flat, param in [(each, param) for each in flats for param in each.params]:
            if isinstance(param, AwayParameter):
                setattr(param, ON_GRAD_READ, self._warn)
            elif not flat.rest.is_sharded:  # else it is shown for a while, and `hide` follows
                cls = type(param)
                if cls not in self._classes:
                    self._classes[cls] = self._watched_class(cls)
                param.__class__ = self._classes[cls]
            self._watched.append(param)

    def end(self) -> None:
        """Ends the watch."""
        for param in self._watched:
            vars(param).pop(ON_GRAD_READ, None)
            own = vars(type(param)).get("watched")
            if own is not None:
                param.__class__ = own
        self._watched.clear()

    def _warn(self) -> None:
        self._has_warned = True
        self.end()
        warnings.warn(MESSAGE, stacklevel=3)

    def _watched_class(self, cls: type) -> type:
        grad: Any = Tensor.grad

        def read(param: nn.Parameter) -> Tensor | None:
            self._warn()
            return grad.__get__(param)

        def fill(namespace: dict) -> None:
            watched = property(read, grad.__set__, grad.__delete__)
            namespace |= {"grad": watched, "watched": cls, "__module__": cls.__module__}

        return new_class(cls.__name__, (cls,), exec_body=fill)
