"""What a parameter reads while its data is away."""

import torch
from torch import Tensor

from hf_zero.errors import LifecycleError


class Placeholders:
    """NaN in any shape at the cost of one element: all placeholders of a dtype are views of one number.

    Most writes raise, since all elements share memory. Those that torch lets through (`fill_`, or one element) change
    that number, and `check` finds it.

    Args:
        device (`torch.device`): of the parameters.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A placeholder: NaN, or 0 for dtypes that have none."""
        if dtype not in self._numbers:
            self._numbers[dtype] = torch.full((), _away(dtype), dtype=dtype, device=self._device)
        return self._numbers[dtype].expand(shape)

    def check(self) -> None:
        """Looks whether someone has written to a placeholder, and makes it NaN again.

        Raises:
            `LifecycleError`: when someone has.
        """
        if self._device.type != "cpu":
            return  # reading the number would make the host wait for the device
        for dtype, number in self._numbers.items():
            if dtype.is_floating_point and number == number:
                number.fill_(_away(dtype))
                raise LifecycleError(
                    "a parameter was written while its data is away, and the write is lost; write inside "
                    "`with hf_zero.gathered(parameter, writeback=True):`"
                )


def _away(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0
