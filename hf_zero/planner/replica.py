"""A copy of a model on the meta device: shapes and dtypes, no data."""

import copy

import torch
from torch import Tensor, nn

from hf_zero.engine.opaque import is_alias, is_opaque, tensors_beside
from hf_zero.planner.lone_rank import META


def replica_of(model: nn.Module, blocks: tuple[str, int] | None = None) -> nn.Module:
    """Copies a model on the meta device: nothing of the original changes, and no memory is taken.

    Args:
        model (`nn.Module`): not sharded; its weights may still be in files, or be nowhere.
        blocks (`tuple[str, int]`, *optional*): the path of the list of blocks, of which only the first so many are
            copied; by default all.
    """
    path, num_blocks = blocks or ("", None)
    left_out = list(model.get_submodule(path))[num_blocks:] if num_blocks is not None else []
    memo: dict[int, object] = {id(block): nn.Identity() for block in left_out}
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    for param in model.parameters():
        memo[id(param)] = _opaque(param, memo) if is_opaque(param) else _plain(param)
    replica = copy.deepcopy(model, memo)
    if left_out:
        del replica.get_submodule(path)[num_blocks:]
    return replica


def _plain(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)


def _opaque(param: nn.Parameter, memo: dict[int, object]) -> Tensor:
    """A parameter of the same class, with copies of what it carries. It does not know its module."""
    data = torch.empty(param.shape, dtype=param.dtype, device=META)  # to look at `param.data` would count it
    for tensor in tensors_beside(param):
        memo[id(tensor)] = data if is_alias(tensor, param) else torch.empty_like(tensor, device=META)
    copied = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    kept = {name: value for name, value in vars(param).items() if not isinstance(value, nn.Module)}
    vars(copied).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    return copied
