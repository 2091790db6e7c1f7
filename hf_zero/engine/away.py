"""Guards for parameters whose data is away: writes and uses are noticed by the host, without a look at a value.

A write gives a placeholder memory of its own (`Placeholders`), or puts another tensor in its place. A use whose
backward needs the parameter holds it once more: that backward would run at a time of its own, when the values are NaN
or another unit's. Uses that hold nothing are seen by `PlaceholderGuard`.
"""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from hf_zero.engine.divided import local_of, put
from hf_zero.engine.flat import Flat
from hf_zero.engine.placeholder import Placeholders, is_untouched, is_written
from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


WRITTEN = (
    "{name}: a parameter was written while its data is away, and the write is lost; write inside "
    "`with hf_zero.gathered(parameter, writeback=True):`"
)
USED = (
    "{name}: is used outside of its block's forward, where its data is away and reads NaN (a view of it that is kept "
    "counts too); make the module that holds it an attribute of a module outside of the blocks too, so that it stays "
    "whole, or use it and run the backward inside `with hf_zero.gathered(...):`, or use stage 2"
)


# Of a write to a placeholder, whose elements are one in memory.
REFUSED_BY_TORCH = "more than one element of the written-to tensor refers to a single memory location"
# So many operations behind a forward are looked at.
NUM_BEHIND_FORWARD = 1000


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def refuse_uses(flat: Flat) -> None:
    """Refuses parameters that were used since their forward has ended.

    Raises:
        `LifecycleError`: when one was, and its backward is to come.
    """
    for info, param, before in zip(flat.infos, flat.params, flat.holders or ()):
        if param._use_count() > before:
            flat.end_use()  # said once
            raise LifecycleError(USED.format(name=info.name))


def refuse_writes(flat: Flat) -> None:
    """Refuses placeholders that were written to or replaced, and puts new ones in their place.

    Raises:
        `LifecycleError`: when someone has.
    """
    if flat.shows_placeholders:
        return
    found = None
    for index, param in enumerate(flat.params):
        values = local_of(param)
        if is_untouched(values):
            continue
        placeholder = flat.placeholders[index]
        is_other = values.untyped_storage()._cdata != placeholder.untyped_storage()._cdata
        if is_other or is_written(placeholder):
            found = found or flat.infos[index].name
        flat.placeholders[index] = Placeholders(placeholder.device).of(placeholder.shape, placeholder.dtype)
        put(param, flat.placeholders[index])
    if found is not None:
        flat.mark_clean()
        raise LifecycleError(WRITTEN.format(name=found))


class PlaceholderGuard(TorchDispatchMode):
    """Refuses computation with parameters whose data is away: in a forward, and in what a loss is made of behind it.
    It takes about ten microseconds for every operation, so it looks at the first forward of each kind alone.

    Args:
        engine (`ZeroEngine`): whose parameters are looked at, for as long as it lives.

    Attributes:
        is_over (`bool`): once set, everything passes.
        has_refused (`bool`): whether it has refused something.
    """

    supports_higher_order_operators = True

    def __init__(self, engine: "ZeroEngine"):
        super().__init__()
        self._engine = weakref.ref(engine)
        flats = [flat for unit in engine.units for flat in unit.flats]
        each = [(placeholder, info.name) for flat in flats for info, placeholder in zip(flat.infos, flat.placeholders)]
        self._names = {placeholder.untyped_storage()._cdata: name for placeholder, name in each}
        self._placeholders = [placeholder for placeholder, _ in each]  # kept, so that no address comes twice
        self._num_left: float = float("inf")
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
        """Looks at what a loss is made of, for so many operations at most: a backward may never come. False where a
        mode of others is active, which would end while this one stays."""
        self._num_left = NUM_BEHIND_FORWARD
        return all(isinstance(mode, PlaceholderGuard) for mode in _get_current_dispatch_mode_stack())

    @staticmethod
    def remove_those_over() -> None:
        """Takes what is over from the stack of modes, as far as that can be: in a backward autograd puts back what
        there was when it began, and modes of others end before."""
        while not in_backward():
            mode = next(reversed(_get_current_dispatch_mode_stack()), None)
            if not isinstance(mode, PlaceholderGuard) or not (mode.is_over or mode._engine() is None):
                return
            mode.__exit__(None, None, None)

    def _name_of(self, tensor: Tensor) -> str | None:
        """The parameter whose placeholder a tensor is, or a view of it."""
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor) or not is_untouched(tensor):
            return None
        return self._names.get(tensor.untyped_storage()._cdata)

    def _is_view(self, result) -> bool:
        outputs = list(_tensors(result))
        return bool(outputs) and all(self._name_of(output) for output in outputs)


def _is_about_shape(func) -> bool:
    """Whether an operation looks at shape, dtype and device alone, or gives a parameter its data."""
    name = func.__name__.partition(".")[0]
    return name.endswith("_like") or name.startswith(("new_", "is_", "_has_"))


def _tensors(*values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)
