"""Slices of flat buffers, or full parameters, that the inner optimizers see as their parameters."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_zero.config import Residency
from hf_zero.engine.access import unit_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat, NamedShard
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError
from hf_zero.storage import DiskTensor


@dataclass(eq=False)
class FlatSlice:
    """A range of one flat buffer in one optimizer group. The inner optimizer sees it as a parameter."""

    unit: Unit
    gradient: Gradient
    start: int  # [start, stop), offsets in the buffer
    stop: int
    group: int
    # view of the master, 1-D or in the shape of a full parameter; a placeholder, except during its update, if this
    # rank does not hold the range
    param: nn.Parameter
    is_whole: bool = False  # a full parameter, for which the optimizer may keep state of any shape

    @classmethod
    def of(
        cls, unit: Unit, gradient: Gradient, start: int, stop: int, group: int, shape: tuple[int, ...] | None = None
    ) -> "FlatSlice":
        """Creates a slice of the buffer's master. `shape` is the shape of a full parameter."""
        flat_slice = cls(unit, gradient, start, stop, group, None, is_whole=shape is not None)
        master = flat_slice.flat.masters.values.detach()
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
        """The indices of the parameters that overlap the slice."""
        return [param_slice.index for param_slice in self.flat.layout.param_slices(self.start, self.stop)]

    @property
    def names(self) -> list[str]:
        return [self.flat.infos[index].name for index in self.indices]

    @property
    def within(self) -> slice:
        """The range of the slice within this rank's part of the master."""
        first = self.flat.masters.covers[0]
        return slice(self.start - first, self.stop - first)

    @property
    def on_disk(self) -> DiskTensor | None:
        """The tensor on disk that stores the master, or `None` if the master is in memory."""
        return self.flat.masters.on_disk

    @property
    def is_held(self) -> bool:
        """Whether this rank holds the master of the slice."""
        low, high = self.flat.masters.covers
        return low <= self.start and self.stop <= high

    @property
    def grad(self) -> Tensor | None:
        """The averaged gradient in the shape of `param`, or `None` if this rank does not hold the slice or no
        parameter of it has a gradient."""
        gradient = self.gradient
        if not (self.is_held and gradient.is_reduced and any(gradient.used[index] for index in self.indices)):
            return None
        start = 0 if gradient.reduced.numel() == self.flat.layout.full_numel else self.flat.owned[0]
        return gradient.reduced[self.start - start : self.stop - start].view(self.param.shape)

    @property
    def saved(self) -> tuple[int, int]:
        """The range whose state this rank saves. If several ranks hold the same state, each saves its own part. If the
        slice extends beyond their shard, the first of them also saves what precedes it, and the last what follows."""
        flat, comm = self.flat, self.flat.comm
        if flat.placement.masters is Residency.REPLICATED:
            return flat.part
        low = self.start if comm.replica == 0 else max(self.start, flat.part[0])
        return low, self.stop if comm.replica == comm.num_replicas - 1 else min(self.stop, flat.part[1])

    def named(self, tensor: Tensor, only: tuple[int, int]) -> Iterator[NamedShard]:
        """Yields the ranges of parameters in `tensor`, which has the shape of `param`, restricted to `only`."""
        covers = (self.start, self.stop)
        if max(covers[0], only[0]) < min(covers[1], only[1]):
            yield from self.flat.named_shards(tensor.reshape(-1), covers, only)

    def cuts(self, key: Callable[[int], object]) -> list[tuple[int, int]]:
        """Returns the ranges in which `key(parameter index)` is constant. Padding belongs to the preceding range."""
        cuts, last = [self.start], None
        for position, index in enumerate(self.indices):
            value = key(index)
            if position and value != last:
                cuts.append(self.flat.layout.spans[index].offset)
            last = value
        return list(zip(cuts, [*cuts[1:], self.stop]))


def named_groups(engine: ZeroEngine, optimizer) -> list[list[str]]:
    """Returns the parameter names of each group. Raises [`ConfigError`] if a group contains a tensor that is not a
    parameter of the model."""
    names = {id(p): info.name for f in engine.flats for info, p in zip(f.infos, f.params)}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer group {index}: a tensor of shape {tuple(param.shape)} is not a parameter of the "
                    "model; build the optimizer on model.parameters()"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def refuse_added(model: nn.Module) -> None:
    """Raises [`LifecycleError`] for trainable parameters that were added after the model was sharded."""
    for name, param in model.named_parameters():
        if param.requires_grad and unit_of(param) is None:
            raise LifecycleError(
                f"{name}: was added after the model was sharded; add trainable parameters (an adapter, a head) before "
                "sharding, or reload the model"
            )


def refuse_unfrozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises [`LifecycleError`] for parameters that were frozen when the model was sharded and are trainable now."""
    unfrozen = next((name for name, param in frozen if param.requires_grad), None)
    if unfrozen is not None:
        raise LifecycleError(
            f"{unfrozen}: was unfrozen after the model was sharded; choose trainable parameters (requires_grad, or "
            "PEFT's set_adapter) before sharding, or reload the model"
        )


def refuse_step_alone(optimizer: torch.optim.Optimizer, *_) -> None:
    """Raises [`LifecycleError`] if the original optimizer is stepped instead of the `ShardedOptimizer` built on it,
    because it has no gradients."""
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        raise LifecycleError(
            f"{type(optimizer).__name__}: was given to a ShardedOptimizer and has no gradients of its own; step the "
            "ShardedOptimizer, or the optimizer that ZeroAccelerator.prepare returned"
        )


def group_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Returns the group index of each parameter, by the parameter's `id`."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def make_slices(
    engine: ZeroEngine, optimizer: torch.optim.Optimizer, elementwise: list[bool], others: list[FlatSlice]
) -> list[FlatSlice]:
    """Creates the slices that this rank updates, in buffer order: its range of every trainable buffer, split where the
    optimizer group changes, and `others`.

    Args:
        elementwise (`list[bool]`): whether each group has an elementwise update.
        others (`list[FlatSlice]`): the slices that this rank updates of groups that are not elementwise.
    """
    by_param, slices = group_of(optimizer), []
    for unit in engine.units:
        for gradient in unit.gradients:
            flat = gradient.flat
            start, stop = flat.masters.covers
            groups = [by_param.get(id(p), -1) for p in flat.params]
            groups = [group if group >= 0 and elementwise[group] else -1 for group in groups]
            for low, high in FlatSlice(unit, gradient, start, stop, -1, None).cuts(groups.__getitem__):
                first = next(flat.layout.param_slices(low, high), None)
                group = -1 if first is None else groups[first.index]
                cuts = flat.masters.cut(low, high) if group >= 0 else ()
                slices += [FlatSlice.of(unit, gradient, *cut, group) for cut in cuts]
            slices += [flat_slice for flat_slice in others if flat_slice.gradient is gradient]
    return slices


def carry_overrides(optimizer: torch.optim.Optimizer, slices: Iterable[FlatSlice]) -> None:
    """Applies bitsandbytes' per-parameter overrides to the slices of these parameters.

    The optimizer gets its own manager, because the one of the package is shared by all optimizers of the process and
    uses `id`s of parameters that may have been freed.
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
