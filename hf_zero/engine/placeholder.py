"""Placeholders, the data that parameters show while their values are away."""

import torch
from torch import Tensor


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
            self._numbers[dtype] = torch.full((), _away(dtype), dtype=dtype, device=self._device)
        return torch._lazy_clone(self._numbers[dtype]).expand(shape)


def is_untouched(tensor: Tensor) -> bool:
    """Whether a tensor is a placeholder that nobody has written to, as far as the host knows."""
    return torch._C._is_cow_tensor(tensor)


def is_written(placeholder: Tensor) -> bool:
    """Whether a placeholder that was touched has changed. A kernel that could write and did not touches it too."""
    if not placeholder.numel() or placeholder.device.type == "meta":
        return False
    number = placeholder.as_strided((), ())
    is_away = number.float().isnan() if placeholder.dtype.is_floating_point else number == 0
    return not bool(is_away)


def _away(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0
