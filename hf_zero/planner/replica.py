"""A copy of a model without data, to be sharded and run in its place."""

import copy

import torch
from torch import Tensor, nn

from hf_zero.planner.lone_rank import META


def replica_of(model: nn.Module) -> nn.Module:
    """Copies a model on the meta device: nothing of the original changes, and no memory is taken.

    Args:
        model (`nn.Module`): not sharded; its weights may still be in files, or be nowhere.
    """
    memo: dict[int, Tensor] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(model, memo)
