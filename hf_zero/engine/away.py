"""Guards for parameters whose data is away: writes and uses are noticed by the host, without a look at a value.

A write gives a placeholder memory of its own (`Placeholders`), or puts another tensor in its place. A use whose
backward needs the parameter holds it once more: that backward would run at a time of its own, when the values are NaN
or another unit's. Uses that hold nothing are seen by `PlaceholderGuard`.
"""

import torch

from hf_zero.engine.divided import local_of, put
from hf_zero.engine.flat import Flat
from hf_zero.engine.placeholder import Placeholders, is_untouched, is_written
from hf_zero.errors import LifecycleError


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
