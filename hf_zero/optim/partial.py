"""Steps of an optimizer over a part of its parameters at a time."""

from collections.abc import Iterable

import torch
from torch import nn


class PartialStep:
    """One step of an optimizer, made in parts: each parameter is stepped once, and what a group counts goes up once.

    The parts are made by a twin that shares the optimizer's state and has the groups' hyperparameters as they are now.
    So they may be made on another thread, while a scheduler sets those of the next step.

    Args:
        optimizer (`torch.optim.Optimizer`): any whose update of a parameter depends on no other one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._twin = object.__new__(type(optimizer))
        self._twin.__dict__.update(optimizer.__dict__)
        self._twin.param_groups = [dict(group) for group in self._groups]

    def step(self, params: Iterable[nn.Parameter], scale: torch.Tensor | None = None) -> None:
        """Steps these parameters.

        Args:
            params (iterable of `nn.Parameter`): with their gradients; those of other optimizers are left alone.
            scale (`Tensor`, *optional*): 0-d, by which a fused optimizer is to multiply the gradients on its way.
        """
        chosen = {id(param) for param in params}
        for group, before in zip(self._twin.param_groups, self._groups):
            group.clear()
            group.update(before, params=[param for param in before["params"] if id(param) in chosen])
        own = next((param for group in self._twin.param_groups for param in group["params"]), None)
        if own is None:
            return
        if scale is not None:  # its own attribute is a divisor
            self._twin.grad_scale, self._twin.found_inf = scale.reciprocal().to(own.device), None
        type(self._twin).step(self._twin)  # a scheduler may have put a step of its own before it

    @property
    def is_outdated(self) -> bool:
        """Whether somebody has set other hyperparameters since."""
        return any(
            group.get(key) is not value and key != "params" and bool(torch.as_tensor(group.get(key) != value).any())
            for group, before in zip(self.optimizer.param_groups, self._groups)
            for key, value in before.items()
        )

    def finish(self) -> None:
        """The optimizer's groups count this step."""
        for group, before, after in zip(self.optimizer.param_groups, self._groups, self._twin.param_groups):
            counted = {key: value for key, value in after.items() if value is not before.get(key)}
            counted.pop("params", None)
            group.update(counted)
        self.optimizer._opt_called = True  # what schedulers look at, to warn of steps that were left out
