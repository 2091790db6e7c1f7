"""The slices of flat buffers, or whole parameters, that the inner optimizers see as their parameters."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.config import Residency
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat, NamedShard
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError
from hf_zero.optim.granularity import PARAMETER, ShardGranularity
from hf_zero.sharding.layout import Layout


if TYPE_CHECKING:
    from hf_zero.storage import DiskTensor


@dataclass(eq=False)
class FlatSlice:
    """A range of one flat buffer that one optimizer group updates: the parameter that the inner optimizer sees.

    Args:
        unit (`Unit`): whose buffer.
        gradient (`Gradient`): of the buffer.
        start (`int`): first element, counted in the buffer.
        stop (`int`): one past the last.
        group (`int`): index of the optimizer group.
        param (`nn.Parameter`): view of the master, 1-D or a whole parameter in its shape. Of a range that this rank
            does not hold, a placeholder but for the time of its update.
        is_whole (`bool`): the optimizer sees a whole parameter, and may keep state of any shape for it.
    """

    unit: Unit
    gradient: Gradient
    start: int
    stop: int
    group: int
    param: nn.Parameter
    is_whole: bool = False

    @property
    def flat(self) -> Flat:
        return self.gradient.flat

    @cached_property
    def indices(self) -> list[int]:
        """The parameters that lie in it, wholly or in part."""
        return [param_slice.index for param_slice in self.flat.layout.param_slices(self.start, self.stop)]

    @property
    def names(self) -> list[str]:
        return [self.flat.infos[index].name for index in self.indices]

    @property
    def within(self) -> slice:
        """Where it lies in what this rank holds of the master."""
        first = self.flat.held[0]
        return slice(self.start - first, self.stop - first)

    @property
    def on_disk(self) -> "DiskTensor | None":
        """Where the master rests on disk."""
        return self.flat.on_disk

    @property
    def is_held(self) -> bool:
        """Whether it lies in what this rank holds of the master."""
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
        """The range of which this rank saves the state: where all ranks update it, each its own."""
        return self.flat.owned if self.flat.plan.master is Residency.REPLICATED else (self.start, self.stop)

    def named(self, tensor: Tensor, only: tuple[int, int]) -> Iterator[NamedShard]:
        """The parameters' slices inside `tensor`, which is shaped like `param`, limited to the range `only`."""
        covers = (self.start, self.stop)
        if max(covers[0], only[0]) < min(covers[1], only[1]):
            yield from self.flat.named_shards(tensor.reshape(-1), covers, only)

    def cuts(self, key: Callable[[int], object]) -> list[tuple[int, int]]:
        """The ranges in which `key(index of the parameter)` is the same; padding goes with what is before it."""
        cuts, last = [self.start], None
        for position, index in enumerate(self.indices):
            value = key(index)
            if position and value != last:
                cuts.append(self.flat.layout.spans[index].offset)
            last = value
        return list(zip(cuts, [*cuts[1:], self.stop]))


@dataclass(frozen=True, eq=False)
class ParamPartition:
    """A parameter that may not be cut just anywhere, and the range of it that each rank updates.

    Args:
        unit (`Unit`): whose parameter.
        gradient (`Gradient`): of its buffer.
        index (`int`): which of the buffer's parameters.
        group (`int`): index of the optimizer group.
        ranges (`list[tuple[int, int]]`): by rank, [start, stop) in the buffer.
        shape (`tuple[int, ...]`, *optional*): of the whole parameter, where the optimizer is to see it.
    """

    unit: Unit
    gradient: Gradient
    index: int
    group: int
    ranges: list[tuple[int, int]]
    shape: tuple[int, ...] | None

    def flat_slice(self, rank: int) -> FlatSlice | None:
        """Returns the slice that a rank updates; `None` where that is nothing."""
        start, stop = self.ranges[rank]
        if start == stop:
            return None
        flat_slice = FlatSlice(
            self.unit, self.gradient, start, stop, self.group, None, is_whole=self.shape is not None
        )
        flat, shape = flat_slice.flat, self.shape or (stop - start,)
        if flat_slice.is_held:
            values = flat.master.detach()[start - flat.held[0] : stop - flat.held[0]].view(shape)
        else:
            values = torch.empty(1, dtype=flat.master.dtype, device=flat.master.device).expand(shape)
        flat_slice.param = nn.Parameter(values)
        return flat_slice


def named_groups(engine: ZeroEngine, optimizer) -> list[list[str]]:
    """The names of each group's parameters.

    Raises:
        `ConfigError`: when a group holds a tensor that is not a parameter of the model.
    """
    names = {id(p): info.name for unit in engine.units for f in unit.flats for info, p in zip(f.infos, f.params)}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer group {index}: a tensor of shape {tuple(param.shape)} is no parameter of the model; "
                    "build the optimizer on model.parameters()"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def make_partitions(engine: ZeroEngine, optimizer, granularities: list[ShardGranularity]) -> list[ParamPartition]:
    """Divides what an optimizer does not update element by element; the same on all ranks.

    Args:
        engine (`ZeroEngine`): the sharded model.
        optimizer: with groups of the model's parameters.
        granularities (`list[ShardGranularity]`): of each group.
    """
    group_of = _group_of(optimizer)
    found = []
    for unit in engine.units:
        for gradient in unit.gradients:
            for index, param in enumerate(gradient.flat.params):
                group = group_of.get(id(param), -1)
                if group >= 0 and not granularities[group].is_elementwise and param.numel():
                    found.append((unit, gradient, index, group))
    whole = [(g.flat.layout, index) for _, g, index, group in found if granularities[group] == PARAMETER]
    owner = iter(owners(whole))
    return [
        ParamPartition(*each, *_divided(each[1].flat, each[2], granularities[each[3]], owner, engine.comm.num_ranks))
        for each in found
    ]


def _divided(flat: Flat, index: int, granularity: ShardGranularity, owner: Iterator[int], num_ranks: int):
    """Returns, by rank, the range that it updates, and the shape that the optimizer is to see."""
    span = flat.layout.spans[index]
    ranges = (
        blocks(flat.layout, index, granularity) if granularity != PARAMETER else [(span.stop, span.stop)] * num_ranks
    )
    if granularity == PARAMETER:
        ranges[next(owner)] = span.offset, span.stop
    if flat.plan.master is Residency.REPLICATED:
        ranges = [(span.offset, span.stop)] * num_ranks
    return ranges, span.shape if granularity == PARAMETER else None


def make_slices(
    engine: ZeroEngine, optimizer, granularities: list[ShardGranularity], partitions: list[ParamPartition]
) -> list[FlatSlice]:
    """Makes the slices that this rank updates: of every trainable buffer what it holds, cut where the optimizer group
    changes; and its part of the partitions."""
    group_of = _group_of(optimizer)
    own: dict[Gradient, list[FlatSlice]] = {}
    for partition in partitions:
        flat_slice = partition.flat_slice(engine.comm.rank)
        if flat_slice is not None:
            own.setdefault(partition.gradient, []).append(flat_slice)
    slices = []
    for unit in engine.units:
        for gradient in unit.gradients:
            flat = gradient.flat
            start, stop = flat.held
            groups = [group_of.get(id(p), -1) for p in flat.params]
            groups = [group if group >= 0 and granularities[group].is_elementwise else -1 for group in groups]
            for low, high in FlatSlice(unit, gradient, start, stop, -1, None).cuts(groups.__getitem__):
                indices = [param_slice.index for param_slice in flat.layout.param_slices(low, high)]
                for first, last in flat.cut(low, high) if indices and groups[indices[0]] >= 0 else ():
                    param = nn.Parameter(flat.master.detach()[first - start : last - start])
                    slices.append(FlatSlice(unit, gradient, first, last, groups[indices[0]], param))
            slices += own.get(gradient, [])
    return slices


def _group_of(optimizer) -> dict[int, int]:
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def carry_overrides(optimizer: torch.optim.Optimizer, slices: Iterable[FlatSlice]) -> None:
    """Applies bitsandbytes' overrides for parameters to the slices of them.

    The optimizer gets a manager of its own: the package's is one for all optimizers of the process, and goes by `id`s
    of parameters that may be gone.

    Args:
        optimizer (`torch.optim.Optimizer`): any; only those of bitsandbytes have such settings.
        slices (iterable of `FlatSlice`): what it updates.
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


# Integers only: which rank updates which range of a parameter that may not be cut just anywhere.


def owners(parameters: list[tuple[Layout, int]]) -> list[int]:
    """Gives every parameter to one rank, so that all ranks update about equally many elements.

    The largest first, each to the rank with the fewest elements so far; of those with equally few, to the one whose
    shard holds most of it, which then need not be sent.

    Args:
        parameters (`list[tuple[Layout, int]]`): each as a layout and the index of the parameter there.

    Returns:
        `list[int]`: the rank of each.
    """
    found = [0] * len(parameters)
    loads = [0] * (parameters[0][0].num_ranks if parameters else 0)
    sizes = [layout.spans[index].numel for layout, index in parameters]
    for position in sorted(range(len(parameters)), key=lambda position: -sizes[position]):
        layout, index = parameters[position]
        rank = min(range(len(loads)), key=lambda rank: (loads[rank], -_held(layout, index, rank)))
        found[position] = rank
        loads[rank] += sizes[position]
    return found


def blocks(layout: Layout, index: int, granularity: ShardGranularity) -> list[tuple[int, int]]:
    """The range of a parameter that each rank updates: its shard, but for the cuts, which move to block boundaries.

    A parameter that is no multiple of the block, or too small for two pieces, goes to one rank as a whole.

    Args:
        layout (`Layout`): of the buffer that it lies in.
        index (`int`): which parameter.
        granularity (`ShardGranularity`): where it may be cut.

    Returns:
        `list[tuple[int, int]]`: by rank, [start, stop) in the buffer; empty where they are equal.
    """
    span = layout.spans[index]
    cuts = [0]
    for rank in range(layout.num_ranks - 1):
        wanted = min(max(layout.owned(rank)[1] - span.offset, 0), span.numel)
        cuts.append(_allowed(wanted, cuts[-1], span.numel, granularity))
    cuts.append(span.numel)
    return [(span.offset + low, span.offset + high) for low, high in zip(cuts, cuts[1:])]


def _allowed(wanted: int, last: int, numel: int, granularity: ShardGranularity) -> int:
    """Returns the cut nearest to the one that is wanted, after the last one."""
    block = granularity.block if numel % granularity.block == 0 else numel
    cut = max(last, (wanted + block // 2) // block * block)
    if cut - last < granularity.min_numel:
        cut = last
    if numel - cut < granularity.min_numel:
        cut = numel if cut > last or 2 * wanted > numel else last
    return cut


def _held(layout: Layout, index: int, rank: int) -> int:
    """Counts the elements of a parameter that a rank's shard holds."""
    start, stop = layout.owned(rank)
    span = layout.spans[index]
    return max(0, min(stop, span.stop) - max(start, span.offset))
