"""Protocols of an engine and an optimizer, as far as this room needs them. It knows neither of their classes."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm


class Parameter(Protocol):
    """A parameter as a whole: its canonical name, global shape, and the dtype in which it is saved."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def save_dtype(self) -> torch.dtype: ...

    @property
    def trainable(self) -> bool: ...


class Shard(Protocol):
    """Elements [start, start + tensor.numel()) of a flattened parameter, or of state that belongs to it in the shape
    `shape`, a 1-D view; writing it writes the state."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def start(self) -> int: ...

    @property
    def tensor(self) -> Tensor: ...


class Engine(Protocol):
    """A sharded model."""

    model: nn.Module
    comm: Comm

    @property
    def stage(self) -> int: ...

    def param_infos(self) -> Sequence[Parameter]:
        """The same on all ranks, in model order, tied parameters once."""

    def named_shards(self, resident: bool = False, values: bool = True) -> Iterator[Shard]:
        """Master values: the ranges this rank owns (all ranks' tile every parameter) or, `resident`, holds, to be
        written. A shard lasts until the next is asked for. Without `values` only shapes and dtypes count."""

    def begin_update(self) -> None:
        """Prepares masters to be written."""

    def mark_updated(self) -> None:
        """Lets what derives from the masters follow them. Collective."""


class Optimizer(Protocol):
    """An optimizer whose state lies with the ranks that update."""

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, Shard]]:
        """(state key such as "exp_avg", shard): of the parameter's shape, or of one of its own (factors, scales); see
        `Engine.named_shards`."""

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """{parameter: {"step": 12.0}} for the parameters of which this rank holds parts."""

    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Comes before the tensors are loaded, and makes their place."""

    def groups_state(self) -> list[dict]:
        """Hyperparameters of each group as JSON knows them, and "param_names"."""

    def load_groups_state(self, groups: list[dict]) -> None: ...
