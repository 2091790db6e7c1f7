"""Placeholders, the data that parameters show while their values are away, and guards for them: writes and uses are
noticed by the host, without a look at a value; `docs/design.md` says how. Uses that hold nothing are seen by
`PlaceholderGuard`."""

import torch
from torch import Tensor

from hf_zero.engine.divided import is_dtensor


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


class Placeholders:
    """Makes placeholders: NaN in any shape, in the memory of one element.

    Most writes raise, since all elements share memory. For those that torch lets through (`fill_`, or one element),
    every placeholder is a lazy copy of one number: the first write gives it memory of its own. So no other changes,
    and `is_untouched` knows of it without a look at the value, for which the host would have to wait for the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a placeholder of NaN, or of 0 for dtypes without NaN."""
        if dtype not in self._numbers:
            away = float("nan") if dtype.is_floating_point else 0
            self._numbers[dtype] = torch.full((), away, dtype=dtype, device=self._device)
        return torch._lazy_clone(self._numbers[dtype]).expand(shape)


def is_untouched(tensor: Tensor) -> bool:
    """Whether a tensor is a placeholder that nobody has written to, as far as the host knows. Returns False for
    DTensors, of which torch cannot tell."""
    return not is_dtensor(tensor) and torch._C._is_cow_tensor(tensor)


def is_written(placeholder: Tensor) -> bool:
    """Whether a placeholder that was touched has changed. A kernel that could write and did not touches it too."""
    if not placeholder.numel() or placeholder.device.type == "meta":
        return False
    number = placeholder.as_strided((), ())
    is_away = number.float().isnan() if placeholder.dtype.is_floating_point else number == 0
    return not bool(is_away)
