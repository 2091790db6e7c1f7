"""The loss of each token from hidden states and a head's weight, computed for one range of the vocabulary at a
time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


Steps = tuple[Callable[[Tensor], Tensor], ...]

# Further statistics of each token that a pass over the logits can compute, in the order of the results.
STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Lower bound of log-probabilities in products with probabilities. Its `exp` is 0 in fp32. Logits of masked words may
# be minus infinity, whose product with 0 would be NaN.
LEAST = -1000.0


@dataclass(frozen=True)
class Ranges:
    """How to compute the logits and which statistics.

    Args:
        width (`int`): Number of words in a range of the vocabulary.
        steps (`tuple`): Elementwise operations on the logits after the head, each a function of one tensor.
        sink (`Sink`, *optional*): Destination of the gradient of the head's weight.
        wanted (`tuple[str, ...]`): The `STATISTICS` to compute.
    """

    width: int
    steps: Steps = ()
    sink: Any = None
    wanted: tuple[str, ...] = ()


class TokenLoss(torch.autograd.Function):
    """Computes the negative log-likelihood of each target under `softmax(steps(hidden @ weight.t() + bias))` in fp32,
    and the requested `STATISTICS` of each token (others are `None`). Of these, only the entropy is differentiable."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, how: Ranges):
        ctx.set_materialize_grads(False)
        ctx.how = how
        sums = _Sums(hidden, targets, how.wanted)
        for rows, logits in ranges(hidden, weight, bias, how.width):
            sums.add(stepped(logits, how.steps).float(), rows)
        log_sum = sums.largest + sums.summed.log()
        results = sums.results(how.wanted, len(weight))
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, results[0])
        ctx.mark_non_differentiable(*(each for each in results[1:] if each is not None))
        return log_sum - sums.chosen, *results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy, *_):
        hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        sink = ctx.how.sink
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad is None:
            grad = torch.zeros_like(log_sum)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        returned, destination, is_filled = None, None, False
        if needs_weight and sink is not None and sink.is_open():
            destination, is_filled = sink.destination()
        elif needs_weight:
            returned = destination = torch.empty_like(weight)
        of_entropy = None if grad_entropy is None else (grad_entropy, entropy)
        for rows, logits in ranges(hidden, weight, bias, ctx.how.width):
            grad_logits = _grad_logits(logits, ctx.how.steps, targets, rows, log_sum, grad, of_entropy)
            if needs_hidden:
                _add_product(grad_hidden, grad_logits, weight[rows])
            if needs_bias:
                torch.sum(grad_logits, 0, out=grad_bias[rows])
            if is_filled:
                destination[rows].addmm_(grad_logits.t(), hidden)
            elif needs_weight:
                torch.mm(grad_logits.t(), hidden, out=destination[rows])
        grad_hidden = grad_hidden.to(hidden.dtype) if needs_hidden else None
        return grad_hidden, returned, grad_bias, None, None


class _Sums:
    """Running sums over the ranges, for each token in fp32.

    Attributes:
        largest (`Tensor`): The largest logit so far.
        summed (`Tensor`): The sum of `exp(logit - largest)`.
        chosen (`Tensor`): The logit of the target.
        total (`Tensor`): The sum of the logits, if "mean_logits" is requested.
    """

    def __init__(self, hidden: Tensor, targets: Tensor, wanted: tuple[str, ...]):
        self._targets, self._wanted = targets, wanted
        lowest = torch.finfo(
            torch.float32
        ).min  # finite, since it is subtracted even if all words of a range are masked
        self.largest = hidden.new_full(targets.shape, lowest, dtype=torch.float32)
        self.summed, self.chosen = torch.zeros_like(self.largest), torch.zeros_like(self.largest)
        # sums of (logit - largest) * exp(logit - largest), and of exp(logit - largest) ** 2
        self._weighted, self._squared, self.total = (torch.zeros_like(self.largest) for _ in range(3))
        self._top = torch.zeros_like(targets)  # first word with the largest logit

    def add(self, logits: Tensor, rows: slice) -> None:
        """Adds the logits of a range, fp32 `(num_tokens, width)`. Overwrites them."""
        place, is_here = _place_in(self._targets, rows)
        self.chosen = torch.where(is_here, logits.gather(1, place[:, None])[:, 0], self.chosen)
        if "mean_logits" in self._wanted:
            self.total.add_(logits.sum(1))
        before, top = self.largest, logits.amax(1)
        if "is_top1" in self._wanted:
            self._top = torch.where(top > before, logits.argmax(1).add_(rows.start), self._top)
        self.largest = torch.maximum(before, top)
        change = before - self.largest
        scale = change.exp()  # 0 for the first range
        logits.sub_(self.largest[:, None])
        if "entropy" in self._wanted:
            exps = logits.clamp_min_(LEAST).exp()
            self._weighted.add_(self.summed * change.clamp_min_(LEAST)).mul_(scale).add_(logits.mul_(exps).sum(1))
        else:
            exps = logits.exp_()
        self.summed.mul_(scale).add_(exps.sum(1))
        if "log_sum_sq_probs" in self._wanted:
            self._squared.mul_(scale).mul_(scale).add_(exps.square_().sum(1))

    def results(self, wanted: tuple[str, ...], vocab_size: int) -> tuple[Tensor | None, ...]:
        """Returns the requested statistics, and `None` for the others."""
        log_summed = self.summed.log()
        found = {
            "entropy": lambda: log_summed - self._weighted / self.summed,
            "log_sum_sq_probs": lambda: self._squared.log() - 2 * log_summed,
            "mean_logits": lambda: self.total / vocab_size,
            "is_top1": lambda: self._top == self._targets,
        }
        return tuple(found[name]() if name in wanted else None for name in STATISTICS)


def ranges(hidden: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the ranges of the vocabulary and their logits, `(num_tokens, width)`. All ranges use the same memory, so
    each overwrites the previous one."""
    num_tokens, vocab_size = len(hidden), len(weight)
    memory = hidden.new_empty(num_tokens * min(width, vocab_size))
    for rows in slices_of(vocab_size, width):
        width = rows.stop - rows.start
        out = memory[: num_tokens * width].view(num_tokens, width)
        if bias is None:
            yield rows, torch.mm(hidden, weight[rows].t(), out=out)
        else:
            yield rows, torch.addmm(bias[rows], hidden, weight[rows].t(), out=out)


def slices_of(size: int, width: int) -> Iterator[slice]:
    """Splits `range(size)` into slices of `width` words."""
    return (slice(start, min(start + width, size)) for start in range(0, size, width))


def _place_in(targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the index of each target in a range of the vocabulary, clamped to it, and whether it is inside."""
    is_here = (targets >= rows.start) & (targets < rows.stop)
    return (targets - rows.start).clamp_(0, rows.stop - rows.start - 1), is_here


def _grad_logits(
    logits: Tensor,
    steps: Steps,
    targets: Tensor,
    rows: slice,
    log_sum: Tensor,
    grad: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Returns the gradient with respect to one range of the head's output. May overwrite `logits`.

    Args:
        logits (`Tensor`): The head's output for the range `rows`.
        grad (`Tensor`): The gradient with respect to the loss of each token.
        of_entropy (`tuple[Tensor, Tensor]`, *optional*): The gradient with respect to each token's entropy, and the
            entropy.
    """
    inputs = logits
    if steps:
        inputs = logits.detach().requires_grad_()
        with torch.enable_grad():
            logits = stepped(inputs, steps)
    outputs = logits.detach()
    # not in place with steps: autograd may have saved their results
    grads = torch.sub(outputs, log_sum[:, None]) if steps else outputs.float().sub_(log_sum[:, None])
    if of_entropy is None:
        grads.exp_().mul_(grad[:, None])
    else:
        grad_entropy, entropy = (each[:, None] for each in of_entropy)
        grads = grads.exp().mul_(grads.clamp_min_(LEAST).add_(entropy).mul_(-grad_entropy).add_(grad[:, None]))
    place, is_here = _place_in(targets, rows)
    grads.scatter_add_(1, place[:, None], torch.where(is_here, -grad, 0.0)[:, None])
    if not steps:
        return grads.to(inputs.dtype)
    return torch.autograd.grad(logits, inputs, grads.to(logits.dtype))[0]


def stepped(logits: Tensor, steps: Steps) -> Tensor:
    """Applies the operations to the logits."""
    for step in steps:
        logits = step(logits)
    return logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
