"""The slices of flat buffers, or whole parameters, that the inner optimizers see as their parameters."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.config import Residency
from hf_zero.engine.access import unit_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat, NamedShard
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError


if TYPE_CHECKING:
    from hf_zero.storage import DiskTensor


@dataclass(eq=False)
class FlatSlice:
    """A range of one flat buffer that one optimizer group updates: the parameter that the inner optimizer sees."""

    unit: Unit
    gradient: Gradient
    start: int  # [start, stop), counted in the buffer
    stop: int
    group: int
    # view of the master, 1-D or a whole parameter in its shape; of a range that this rank does not hold, a placeholder
    # but for the time of its update
    param: nn.Parameter
    is_whole: bool = False  # the optimizer sees a whole parameter, and may keep state of any shape for it

    @classmethod
    def of(
        cls, unit: Unit, gradient: Gradient, start: int, stop: int, group: int, shape: tuple[int, ...] | None = None
    ) -> "FlatSlice":
        """Makes a slice of the buffer's master. `shape`: of a whole parameter."""
        flat_slice = cls(unit, gradient, start, stop, group, None, is_whole=shape is not None)
        master = flat_slice.flat.master.detach()
        if flat_slice.is_held:
            values = master[flat_slice.within].view(shape or -1)
        else:
            values = master.new_empty(1).expand(shape or (stop - start,))
        flat_slice.param = nn.Parameter(values)
        return flat_slice

    @property
    def flat(self) -> Flat:
        return self.gradient.flat

    @cached_property
    def indices(self) -> list[int]:
        """The indices of the parameters that lie in the slice, wholly or in part."""
        return [param_slice.index for param_slice in self.flat.layout.param_slices(self.start, self.stop)]

    @property
    def names(self) -> list[str]:
        return [self.flat.infos[index].name for index in self.indices]

    @property
    def within(self) -> slice:
        """The range of the slice in this rank's part of the master."""
        first = self.flat.held[0]
        return slice(self.start - first, self.stop - first)

    @property
    def on_disk(self) -> "DiskTensor | None":
        """The tensor on disk in which the master rests; `None` where it rests in memory."""
        return self.flat.rest.masters.on_disk

    @property
    def is_held(self) -> bool:
        """Whether this rank holds the master of the slice."""
        low, high = self.flat.held
        return low <= self.start and self.stop <= high

    @property
    def grad(self) -> Tensor | None:
        """The averaged gradient in the shape of `param`, where this rank holds the slice and there is one."""
        gradient = self.gradient
        if not (self.is_held and gradient.is_reduced and any(gradient.used[index] for index in self.indices)):
            return None
        start = 0 if gradient.reduced.numel() == self.flat.layout.full_numel else self.flat.owned[0]
        return gradient.reduced[self.start - start : self.stop - start].view(self.param.shape)

    @property
    def saved(self) -> tuple[int, int]:
        """The range whose state this rank saves. Of what several ranks update alike, each saves the part for which it
        is responsible; the first and the last of them also what lies before and behind their shard."""
        flat, comm = self.flat, self.flat.comm
        if flat.placement.masters is Residency.REPLICATED:
            return flat.part
        low = self.start if comm.replica == 0 else max(self.start, flat.part[0])
        return low, self.stop if comm.replica == comm.num_replicas - 1 else min(self.stop, flat.part[1])

    def named(self, tensor: Tensor, only: tuple[int, int]) -> Iterator[NamedShard]:
        """Yields the parameters' ranges inside `tensor`, which is shaped like `param`, limited to the range `only`."""
        covers = (self.start, self.stop)
        if max(covers[0], only[0]) < min(covers[1], only[1]):
            yield from self.flat.named_shards(tensor.reshape(-1), covers, only)

    def cuts(self, key: Callable[[int], object]) -> list[tuple[int, int]]:
        """Returns the ranges in which `key(index of the parameter)` is the same. Padding belongs to the range before
        it."""
        cuts, last = [self.start], None
        for position, index in enumerate(self.indices):
            value = key(index)
            if position and value != last:
                cuts.append(self.flat.layout.spans[index].offset)
            last = value
        return list(zip(cuts, [*cuts[1:], self.stop]))


def named_groups(engine: ZeroEngine, optimizer) -> list[list[str]]:
    """Returns the names of each group's parameters. Raises [`ConfigError`] when a group holds a tensor that is not a
    parameter of the model."""
    names = {id(p): info.name for f in engine.flats for info, p in zip(f.infos, f.params)}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer group {index}: a tensor of shape {tuple(param.shape)} is no parameter of the model; "
                    "build the optimizer on model.parameters()"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def refuse_added(model: nn.Module) -> None:
    """Refuses trainable parameters that came after the model was sharded."""
    for name, param in model.named_parameters():
        if param.requires_grad and unit_of(param) is None:
            raise LifecycleError(
                f"{name}: was added after the model was sharded; add what is to be trained (an adapter, a head) "
                "before, or load the model anew"
            )


def refuse_unfrozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that were frozen when the model was sharded, and are trainable now."""
    unfrozen = next((name for name, param in frozen if param.requires_grad), None)
    if unfrozen is not None:
        raise LifecycleError(
            f"{unfrozen}: was unfrozen after the model was sharded; choose what is trained (requires_grad, or "
            "PEFT's set_adapter) before, or load the model anew"
        )


def refuse_step_alone(optimizer: torch.optim.Optimizer, *_) -> None:
    """Refuses a step of an optimizer without the `ShardedOptimizer` that it was given to: it finds no gradients.
    Raises [`LifecycleError`] naming the one that steps."""
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        raise LifecycleError(
            f"{type(optimizer).__name__}: was given to the ShardedOptimizer that has the gradients, and has none of "
            "its own to step with; step that one, or what ZeroAccelerator.prepare has returned for this one"
        )


def group_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Returns the index of each parameter's group, by the parameter's `id`."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def make_slices(
    engine: ZeroEngine, optimizer: torch.optim.Optimizer, elementwise: list[bool], others: list[FlatSlice]
) -> list[FlatSlice]:
    """Makes the slices that this rank updates, in the order of the buffers: its range of every trainable buffer, cut
    where the optimizer group changes, and the slices `others`. `elementwise`: whether each group is updated so;
    `others`: what this rank updates of the other groups."""
    by_param, slices = group_of(optimizer), []
    for unit in engine.units:
        for gradient in unit.gradients:
            flat = gradient.flat
            start, stop = flat.held
            groups = [by_param.get(id(p), -1) for p in flat.params]
            groups = [group if group >= 0 and elementwise[group] else -1 for group in groups]
            for low, high in FlatSlice(unit, gradient, start, stop, -1, None).cuts(groups.__getitem__):
                first = next(flat.layout.param_slices(low, high), None)
                group = -1 if first is None else groups[first.index]
                cuts = flat.rest.masters.cut(low, high) if group >= 0 else ()
                slices += [FlatSlice.of(unit, gradient, *cut, group) for cut in cuts]
            slices += [flat_slice for flat_slice in others if flat_slice.gradient is gradient]
    return slices


def carry_overrides(optimizer: torch.optim.Optimizer, slices: Iterable[FlatSlice]) -> None:
    """Applies bitsandbytes' overrides for parameters to the slices of them.

    The optimizer gets a manager of its own: the package's is one for all optimizers of the process, and goes by `id`s
    of parameters that may be gone.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return
    settings = dict(manager.pid2config)
    for module, name, values in manager.module_weight_config_triple:
        settings[id(getattr(module, name))] = values
    optimizer.mng = own = object.__new__(type(manager))
    own.initialize()
    for flat_slice in slices:
        found = [settings.get(id(flat_slice.flat.params[index])) for index in flat_slice.indices]
        if found and found[0] is not None:
            own.pid2config[id(flat_slice.param)] = found[0]
