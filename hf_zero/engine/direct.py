"""Weight gradients of `nn.Linear` and `nn.Embedding`, written straight into the buffer that is reduced.

Autograd would allocate a tensor for each, add up those of tied weights in further ones, and the engine would copy the
result. Here the matrix product writes where the gradient belongs. Values are those of the stock modules: the same
kernels on the same operands; only gradients that are sums (tied weights, several micro-batches) are added up in place.

[Note: what stands in for AccumulateGrad]
The functions below take the weight as an input and return no gradient for it. The weight's AccumulateGrad node still
runs, once, after all its uses in that backward, with nothing to add. Where it would not run, as in
`torch.autograd.grad`, the gradient is returned in the ordinary way.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit


class Sink:
    """Where one weight's gradient goes.

    Args:
        engine (`ZeroEngine`): who is told that a gradient comes.
        unit (`Unit`): which holds the weight.
        gradient (`Gradient`): of the weight's buffer.
        index (`int`): which of its parameters.
        node: the weight's AccumulateGrad node.
    """

    def __init__(self, engine: ZeroEngine, unit: Unit, gradient: Gradient, index: int, node):
        self.engine = engine
        self.unit = unit
        self.gradient = gradient
        self.index = index
        self.node = node

    def is_open(self) -> bool:
        """Whether the backward under way accumulates this weight's gradient, instead of returning it to a caller."""
        try:
            return torch._C._will_engine_execute_node(self.node)
        except RuntimeError:  # `torch.autograd.grad` with respect to the weight
            return False

    def place(self) -> tuple[Tensor, bool]:
        """The gradient's place, and whether something is there already to which to add."""
        self.engine.expect(self.unit, self.gradient, self.index)
        return self.gradient.place(self.index)

    def serves(self, weight: nn.Parameter, input_: Tensor) -> bool:
        """Whether a call may go through the functions below: nobody else wants to see the gradient or the call."""
        return (
            torch.is_grad_enabled()
            and weight.requires_grad
            and type(input_) in (Tensor, nn.Parameter)
            and not weight._backward_hooks
            and not weight._post_accumulate_grad_hooks
            and not torch.compiler.is_compiling()
        )


def install(engine: ZeroEngine, sinks: dict[int, Sink]) -> None:
    """Routes the calls of stock linear and embedding modules through the functions below.

    Args:
        engine (`ZeroEngine`): of the model.
        sinks (`dict[int, Sink]`): by `id` of the weight.
    """
    for module in engine.model.modules():
        if "forward" in module.__dict__ or type(module) not in (nn.Linear, nn.Embedding):
            continue
        sink = sinks.get(id(module.weight))
        if sink is None:
            continue
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, sink)
        elif module.max_norm is None and not module.sparse and not module.scale_grad_by_freq and _on_cpu(module):
            module.forward = partial(_embedding, module, sink)


def _on_cpu(module: nn.Embedding) -> bool:
    # CUDA adds rows in no fixed order; its stock backward sorts them first
    return module.weight.device.type == "cpu"


def _linear(module: nn.Linear, sink: Sink, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if torch.is_autocast_enabled(input.device.type):
        if weight.dtype is not torch.get_autocast_dtype(input.device.type):
            return F.linear(input, weight, bias)
        input = input.to(weight.dtype)
    if not sink.serves(weight, input) or input.dtype is not weight.dtype:
        return F.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, sink)


def _embedding(module: nn.Embedding, sink: Sink, input: Tensor) -> Tensor:
    if not sink.serves(module.weight, input):
        return F.embedding(input, module.weight, module.padding_idx)
    return _Embedding.apply(input, module.weight, module.padding_idx, sink)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, sink):
        ctx.save_for_backward(input, weight)
        ctx.sink = sink
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = (rows @ weight).view(input.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        columns, inputs = rows.t(), input.reshape(-1, input.shape[-1])
        if not ctx.sink.is_open():
            return grad_input, columns @ inputs, grad_bias, None
        place, is_filled = ctx.sink.place()
        if is_filled:
            place.addmm_(columns, inputs)
        else:
            torch.mm(columns, inputs, out=place)
        return grad_input, None, grad_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, padding_idx, sink):
        ctx.save_for_backward(input)
        ctx.padding_idx, ctx.num_rows, ctx.sink = padding_idx, weight.shape[0], sink
        return F.embedding(input, weight, padding_idx)

    @staticmethod
    def backward(ctx, grad):
        (input,) = ctx.saved_tensors
        if not ctx.sink.is_open():
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx
            return None, torch.ops.aten.embedding_dense_backward(grad, input, ctx.num_rows, padding, False), None, None
        place, is_filled = ctx.sink.place()
        if not is_filled:
            place.zero_()
        rows, values = input.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding_idx is not None:
            kept = rows != ctx.padding_idx
            rows, values = rows[kept], values[kept]
        place.index_add_(0, rows, values)
        return None, None, None, None
