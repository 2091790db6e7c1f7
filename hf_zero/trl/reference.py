"""A reference model that follows the policy (TR-DPO, arXiv 2404.09656), both of them sharded."""

from itertools import groupby

import torch
from torch import nn

from hf_zero.engine import gathered
from hf_zero.engine.access import unit_of


@torch.no_grad()
def sync_reference(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Moves the reference by `alpha` of the way to the model, one unit at a time. All ranks call it.

    Args:
        model (`nn.Module`): the policy.
        reference (`nn.Module`): of the same architecture.
        alpha (`float`): 1 copies the policy.
    """
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for _, group in groupby(pairs, key=lambda pair: unit_of(pair[0])):
        sources, targets = zip(*group)
        with gathered(sources), gathered(targets, writeback=True):
            for source, target in zip(sources, targets):
                target.mul_(1.0 - alpha).add_(source, alpha=alpha)
