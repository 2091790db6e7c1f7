"""Tiny models, one for each way in which names, ties and buffers can be."""

import torch
from torch import nn
from transformers import BertForMaskedLM

from tests import models


def llama(tie: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return models.llama(tie, hidden=16, layers=2)


def tied_llama() -> nn.Module:
    return llama(tie=True)


def gpt2() -> nn.Module:
    return models.build("gpt2")


def t5() -> nn.Module:
    return models.build("t5")


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(models.build("bert").config)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return models.mixtral(hidden=16, layers=2, experts=4)


class Plain(nn.Module):
    """No config; a tie that nothing declares, an empty and a 0-d parameter, buffers of both kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.low = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("columns", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
