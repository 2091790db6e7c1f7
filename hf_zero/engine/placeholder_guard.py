"""A dispatch mode that sees all uses of parameters whose data is away, in the first forward of each kind."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from hf_zero.engine.away import REFUSED_BY_TORCH, USED, WRITTEN, in_backward, is_untouched
from hf_zero.engine.model_units import ModelUnits
from hf_zero.errors import LifecycleError


# So many operations behind a forward are looked at.
NUM_BEHIND_FORWARD = 1000


class PlaceholderGuard(TorchDispatchMode):
    """Refuses computation with parameters whose data is away, in a forward and in the loss behind it. It costs about
    ten microseconds per operation, so only the first forward of each kind runs under it. Once `is_over` is set,
    everything passes."""

    supports_higher_order_operators = True

    def __init__(self, engine: ModelUnits):
        super().__init__()
        self._engine = weakref.ref(engine)
        each = [(lazy, info.name) for flat in engine.flats for info, lazy in zip(flat.infos, flat.placeholders)]
        self._names = {placeholder.untyped_storage()._cdata: name for placeholder, name in each}
        self._placeholders = [placeholder for placeholder, _ in each]  # kept, so that no address comes twice
        self._num_left: float = float("inf")
        self._is_inference = torch.is_inference_mode_enabled()
        self.is_over = False
        self.has_refused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._num_left -= 1
        self.is_over = self.is_over or self._num_left < 0 or self._engine() is None
        if self.is_over:
            return func(*args, **kwargs)
        read = next(filter(None, map(self._name_of, _tensors(*args, *kwargs.values()))), None)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if read is None or REFUSED_BY_TORCH not in str(error):
                raise
            raise LifecycleError(WRITTEN.format(name=read)) from error
        if read is not None and not _is_about_shape(func) and not self._is_view(result):
            self.has_refused = True
            raise LifecycleError(USED.format(name=read))
        return result

    def stay(self) -> bool:
        """Stays active after the forward, to see the operations of the loss, for a limited number of operations.
        Returns False where another dispatch mode is active."""
        self._num_left = NUM_BEHIND_FORWARD
        return all(isinstance(mode, PlaceholderGuard) for mode in _get_current_dispatch_mode_stack())

    @staticmethod
    def remove_those_over() -> None:
        """Removes guards that have ended from torch's stack of modes. A guard below another mode stays until that mode
        ends, and one from outside of an `inference_mode` until that is left: it would bring back half of the guard."""
        while not in_backward():
            mode = next(reversed(_get_current_dispatch_mode_stack()), None)
            if not isinstance(mode, PlaceholderGuard) or not (mode.is_over or mode._engine() is None):
                return
            if mode._is_inference is not torch.is_inference_mode_enabled():
                return
            mode.__exit__(None, None, None)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Returns the name of the parameter whose placeholder a tensor is or views; `None` for other tensors."""
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor) or not is_untouched(tensor):
            return None
        return self._names.get(tensor.untyped_storage()._cdata)

    def _is_view(self, result) -> bool:
        outputs = list(_tensors(result))
        return bool(outputs) and all(self._name_of(output) for output in outputs)


class FirstForwards:
    """Runs the first forward of each kind under a `PlaceholderGuard`. The kinds are training or evaluation, with or
    without gradients. The guard stays until the backward, so it sees the loss too."""

    def __init__(self, engine: ModelUnits):
        self._engine = engine
        self._guard: PlaceholderGuard | None = None  # None but from the first forward of each kind to its backward
        self._guarded: set[tuple[bool, bool]] = set()  # the kinds

    def begin_forward(self, has_backward: bool) -> None:
        """Starts a guard if the forward is the first of its kind."""
        kind = (self._engine.model.training, has_backward)
        if kind not in self._guarded and any(unit.is_sharded for unit in self._engine.blocks):
            self._guarded.add(kind)
            self._guard = PlaceholderGuard(self._engine)
            self._guard.__enter__()

    def end_forward(self, failed: bool) -> None:
        """Ends the guard, unless a loss is to come."""
        if self._guard is None:
            return
        if failed:
            self._guarded.clear()
        if failed or not (self._engine.model.training and torch.is_grad_enabled() and self._guard.stay()):
            self.end()

    def end(self) -> None:
        """Ends the guard. After a refusal the next forwards run under a guard again."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.is_over = True
            if guard.has_refused:
                self._guarded.clear()
        PlaceholderGuard.remove_those_over()


def _is_about_shape(func) -> bool:
    """Whether an operation reads only shape, dtype and device, or sets a parameter's data."""
    name = func.__name__.partition(".")[0]
    return name.endswith("_like") or name.startswith(("new_", "is_", "_has_"))


def _tensors(*values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)
