"""The loss of each token from hidden states and a head's weight, computed for one range of the vocabulary at a
time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


Steps = tuple[Callable[[Tensor], Tensor], ...]


class TokenLoss(torch.autograd.Function):
    """The negative log-likelihood of each target under `softmax(steps(hidden @ weight.t() + bias))`, in fp32.

    Args:
        hidden (`Tensor`): `(num_tokens, hidden_size)`.
        weight (`Tensor`): `(vocab_size, hidden_size)`.
        bias (`Tensor`, *optional*): `(vocab_size,)`.
        targets (`Tensor`): int64 `(num_tokens,)`: token ids, or -1 for no target.
        steps (`tuple`): Elementwise operations on the logits after the head, each a function of one tensor.
        width (`int`): Number of words in a range of the vocabulary.
        sink (`Sink`, *optional*): Destination of the gradient of the head's weight.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, steps: Steps, width: int, sink: Any = None):
        ctx.steps, ctx.width, ctx.sink = steps, width, sink
        # finite, since it is subtracted even if all words of a range are masked
        lowest = torch.finfo(torch.float32).min
        largest = hidden.new_full(targets.shape, lowest, dtype=torch.float32)
        summed, chosen = torch.zeros_like(largest), torch.zeros_like(largest)  # sum of exp(logit - largest)
        for rows, logits in ranges(hidden, weight, bias, width):
            logits = stepped(logits, steps).float()
            place, is_here = _place_in(targets, rows)
            chosen = torch.where(is_here, logits.gather(1, place[:, None])[:, 0], chosen)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            summed.mul_((before - largest).exp())  # 0 for the first range
            summed.add_(logits.sub_(largest[:, None]).exp_().sum(1))
        log_sum = largest + summed.log()
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        return log_sum - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        returned, destination, is_filled = None, None, False
        if needs_weight and ctx.sink is not None and ctx.sink.is_open():
            destination, is_filled = ctx.sink.destination()
        elif needs_weight:
            returned = destination = torch.empty_like(weight)
        for rows, logits in ranges(hidden, weight, bias, ctx.width):
            grad_logits = _grad_logits(logits, ctx.steps, targets, rows, log_sum, grad)
            if needs_hidden:
                _add_product(grad_hidden, grad_logits, weight[rows])
            if needs_bias:
                torch.sum(grad_logits, 0, out=grad_bias[rows])
            if is_filled:
                destination[rows].addmm_(grad_logits.t(), hidden)
            elif needs_weight:
                torch.mm(grad_logits.t(), hidden, out=destination[rows])
        grad_hidden = grad_hidden.to(hidden.dtype) if needs_hidden else None
        return grad_hidden, returned, grad_bias, None, None, None, None


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


def _grad_logits(logits: Tensor, steps: Steps, targets: Tensor, rows: slice, log_sum: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient with respect to the head's output for the range `rows`, `logits`, which it may overwrite.
    `grad` is the gradient with respect to the loss of each token."""
    inputs = logits
    if steps:
        inputs = logits.detach().requires_grad_()
        with torch.enable_grad():
            logits = stepped(inputs, steps)
    outputs = logits.detach()
    # not in place with steps: autograd may have saved their results
    grads = torch.sub(outputs, log_sum[:, None]) if steps else outputs.float().sub_(log_sum[:, None])
    grads.exp_().mul_(grad[:, None])
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
