"""Words that a head masks: losses and entropies a range at a time are those of all logits."""

import pytest
import torch
import torch.nn.functional as F

from hf_zero.activation.vocabulary_ranges import STATISTICS, Ranges, TokenLoss


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("steps", [(), (lambda logits: logits / 0.7,)], ids=["plain", "temperature"])
@pytest.mark.parametrize("mask", [-torch.inf, LOWEST, -1e5])
def test_masked_words_add_nothing(mask, steps):
    """The first range is masked as a whole, so is one later on, and a part of a third."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=draw) for size in (12, 75))
    bias, targets = torch.randn(75, generator=draw), torch.randint(16, 32, (12,), generator=draw)
    masked = torch.cat([torch.arange(16), torch.arange(32, 52), torch.arange(70, 75)])
    bias[masked] = mask
    weight[masked] = 0.0
    found, expected = [], []
    for results, act in ((found, _in_ranges), (expected, _of_all)):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
        loss, entropy = act(*leaves, targets, steps)
        (loss.sum() + (entropy * torch.linspace(-3, 3, 12)).sum()).backward()
        results.extend((loss, entropy, *(each.grad for each in leaves)))
    assert all(each.isfinite().all() for each in expected)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-6)


def _in_ranges(hidden, weight, bias, targets, steps):
    loss, entropy, log_sum_sq_probs, *_ = TokenLoss.apply(
        hidden, weight, bias, targets, Ranges(16, steps, wanted=STATISTICS)
    )
    assert log_sum_sq_probs.isfinite().all()
    return loss, entropy


def _of_all(hidden, weight, bias, targets, steps):
    logits = F.linear(hidden, weight, bias)
    for step in steps:
        logits = step(logits)
    log_probs = logits.log_softmax(-1)
    return F.nll_loss(log_probs, targets, reduction="none"), -(log_probs.exp() * log_probs.clamp_min(-1e5)).sum(-1)
