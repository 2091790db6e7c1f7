"""What models of few blocks tell of deep ones.

[Note: deep models] Where all blocks are alike, what a few of them take tells what many take. Each number that is
predicted is an affine function of how many blocks there are: at any named moment of a step, such as the end of the
second block's backward, each further block adds the same. A peak is not, being the largest of several moments; so the
moments are extended, each by itself, and the largest of them is taken.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from hf_zero.engine.partition import UnitSpec, partition


def alike_blocks(model: nn.Module) -> str | None:
    """Returns the path of the list that has all of a model's blocks, if they are equal; `None` where there is none."""
    stacks = partition(model).stacks
    units = stacks[0].blocks if len(stacks) == 1 else []
    path = units[0].name.rpartition(".")[0] if units else ""
    container = model.get_submodule(path)
    is_list = isinstance(container, nn.ModuleList) and len(container) == len(units)
    is_alike = is_list and len({_shapes(unit) for unit in units}) == 1
    return path if is_alike and all(unit.name.rpartition(".")[0] == path for unit in units) else None


def _shapes(unit: UnitSpec) -> tuple:
    return tuple(
        (name.removeprefix(unit.name), tuple(param.shape), param.dtype, param.requires_grad)
        for name, param in unit.params.items()
    )


def extended(fewer: Any, more: Any, times: int) -> Any:
    """Extrapolates every whole number of two equal structures: the result is `times` as far from `fewer` as `more` is.

    Args:
        fewer: a number, or a list, dict or dataclass of such.
        more: likewise.
        times (`int`): how often the difference is added.
    """
    if fewer == more or isinstance(fewer, bool) or type(fewer) is not type(more):
        return fewer
    if isinstance(fewer, int):
        return fewer + (more - fewer) * times
    if isinstance(fewer, list):
        return [extended(a, b, times) for a, b in zip(fewer, more, strict=True)]
    if isinstance(fewer, dict):
        return {key: extended(value, more[key], times) for key, value in fewer.items()}
    if is_dataclass(fewer) and not isinstance(fewer, type):
        pairs = ((field.name, getattr(fewer, field.name), getattr(more, field.name)) for field in fields(fewer))
        return type(fewer)(**{name: extended(a, b, times) for name, a, b in pairs})
    return fewer
