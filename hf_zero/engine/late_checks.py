"""Conditions that a device computes, and that the host reads when they have arrived, so that it waits for none."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Bus, Transfer


# The host waits for the oldest condition only when so many are on their way; it is seldom more than one step ahead.
MAX_CHECKS = 16


@dataclass(frozen=True)
class _Check:
    """A condition on its way to the host, and what raises where it does not hold."""

    arriving: Transfer
    holds: Tensor  # on the host
    refuse: Callable[[], None]
    undo: Callable[[], None]

    def is_met(self) -> bool:
        """Waits for the condition, and returns it. Its memory on the device may then be given to others."""
        self.arriving.synchronize()
        self.arriving.wait()
        return bool(self.holds)


class LateChecks:
    """Conditions that have to hold on all ranks alike. Where the host waits for the device anyway, each is read at
    once; else after it has arrived.

    [Note: one decision of all ranks] Every rank computes the same bits, but learns them at a time of its own. So the
    ranks exchange whether one of them knows of a condition that does not hold (`has_failed`), and then all `settle`.

    Args:
        reads_at_once (`bool`): whether the host waits for each condition.
    """

    def __init__(self, bus: Bus, reads_at_once: bool):
        self._bus = bus
        self._reads_at_once = reads_at_once
        self._checks: deque[_Check] = deque()
        self._unused: list[Tensor] = []  # memory of the host for conditions; to page-lock more makes the host wait

    def expect(self, holds: Tensor, refuse: Callable[[], None], undo: Callable[[], None] = lambda: None) -> None:
        """Adds a condition. All ranks call it.

        Args:
            holds (`Tensor`): 0-d bool, the same on all ranks.
            refuse (`Callable`): raises an error. All ranks call it, so it may exchange what the error says.
            undo (`Callable`): called before, for each condition that does not hold, also where another is refused.
        """
        if self._reads_at_once:
            if not bool(holds):
                undo()
                refuse()
            return
        target = self._unused.pop() if self._unused else self._bus.empty(1, torch.bool)
        self._checks.append(_Check(self._bus.down(target, holds.reshape(1)), target, refuse, undo))

    def has_failed(self) -> bool:
        """Whether a condition that has arrived does not hold. Those that hold are forgotten."""
        while self._checks and (self._checks[0].arriving.is_done() or len(self._checks) > MAX_CHECKS):
            if not self._checks[0].is_met():
                return True
            self._unused.append(self._checks.popleft().holds)
        return False

    def settle(self) -> None:
        """Waits for all conditions, and raises where one does not hold. All ranks call it."""
        checks, self._checks = self._checks, deque()
        failed = [check for check in checks if not check.is_met()]  # waits for each: its memory may be given to others
        self._unused += [check.holds for check in checks]
        for check in failed:
            check.undo()
        for check in failed[:1]:
            check.refuse()
