"""A step of an optimizer over some of its parameters: those whose gradients are available."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_zero.optim.flat_slices import FlatSlice, refuse_step_alone


@contextmanager
def lent(grads: Iterable[tuple[FlatSlice, Tensor]]) -> Iterator[list[nn.Parameter]]:
    """Sets the gradients of the slices' parameters inside the context."""
    grads = list(grads)
    try:
        for flat_slice, grad in grads:
            flat_slice.param.grad = grad.to(flat_slice.param.dtype)
        yield [flat_slice.param for flat_slice, _ in grads]
    finally:
        for flat_slice, _ in grads:
            flat_slice.param.grad = None


def sharing_state(optimizer: torch.optim.Optimizer, groups: list[dict]) -> torch.optim.Optimizer:
    """Returns a shallow copy of an optimizer that shares its state but has other groups."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.param_groups = groups
    return copy


class PartialStep:
    """One step of an optimizer, executed in parts. Each parameter is updated once, and the groups' step counts
    increase once.

    Parts are executed by a shallow copy that shares the optimizer's state and has the groups' hyperparameters as of
    its creation, so they can run on another thread while a scheduler sets those of the next step. The optimizer must
    update each parameter independently of the others."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._copy = sharing_state(optimizer, [dict(group) for group in self._groups])
        hooks = optimizer._optimizer_step_pre_hooks.items()  # a part may legitimately have no gradients
        self._copy._optimizer_step_pre_hooks = OrderedDict(each for each in hooks if each[1] is not refuse_step_alone)

    def step(
        self, params: Iterable[nn.Parameter], scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Updates some parameters.

        Args:
            params (iterable of `nn.Parameter`): the parameters, with gradients. Those of other optimizers are ignored.
            scale (`Tensor`, *optional*): 0-d, a factor that a fused optimizer applies to the gradients.
            found_inf (`Tensor`, *optional*): 0-d fp32; if it is 1, a fused optimizer updates nothing.
        """
        chosen = {id(param) for param in params}
        # slices may have been split since, see `ShardedOptimizer._update`
        for group, before, now in zip(self._copy.param_groups, self._groups, self.optimizer.param_groups):
            group.clear()
            group.update(before, params=[param for param in now["params"] if id(param) in chosen])
        own = next((param for group in self._copy.param_groups for param in group["params"]), None)
        if own is None:
            return
        if scale is not None or found_inf is not None:  # torch's attribute is a divisor
            self._copy.grad_scale = None if scale is None else scale.reciprocal().to(own.device)
            self._copy.found_inf = found_inf
        type(self._copy).step(self._copy)  # not `copy.step`, which a scheduler may have wrapped

    @property
    def is_outdated(self) -> bool:
        """Whether the hyperparameters have changed since the start of the step."""
        return any(
            group.get(key) is not value and key != "params" and bool(torch.as_tensor(group.get(key) != value).any())
            for group, before in zip(self.optimizer.param_groups, self._groups)
            for key, value in before.items()
        )

    def finish(self) -> None:
        """Adds this step to the step counts of the optimizer's groups."""
        for group, before, after in zip(self.optimizer.param_groups, self._groups, self._copy.param_groups):
            counted = {key: value for key, value in after.items() if value is not before.get(key)}
            counted.pop("params", None)
            group.update(counted)
        self.optimizer._opt_called = True  # schedulers warn of skipped steps without it
