"""Writes weight gradients of linear and embedding modules directly into the buffer that is reduced.

Otherwise autograd would allocate a tensor for each gradient, and the engine would copy it. The values equal those of
the stock modules, because the same kernels run on the same operands. Only gradients that are sums (tied weights,
several micro-batches) are accumulated in place.

[Note: the AccumulateGrad node still runs]
The functions below take the weight as an input and return no gradient for it. The weight's AccumulateGrad node still
runs once, after all uses of the weight in that backward, with nothing to add. If it would not run, as in
`torch.autograd.grad`, the gradient is returned as usual.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.patch import Patch
from hf_zero.engine.unit import Unit


# For smaller weights, allocating and copying a gradient is faster than the extra Python code.
MIN_NUMEL = 2**16


class Sink:
    """The destination of one weight's gradient, and whether the gradient may be written there directly. `node`: the
    weight's AccumulateGrad node."""

    def __init__(self, engine: ZeroEngine, unit: Unit, gradient: Gradient, index: int, node):
        self.engine = engine
        self.unit = unit
        self.gradient = gradient
        self.index = index
        self.param = gradient.flat.params[index]
        self.node = node

    def is_open(self) -> bool:
        """Whether the current backward accumulates this weight's gradient, instead of returning it to a caller."""
        if _has_hooks(self.param) or not self.param.requires_grad:  # changed after the forward
            return False
        try:
            return torch._C._will_engine_execute_node(self.node)
        except RuntimeError:  # `torch.autograd.grad` with respect to the weight
            return False

    def destination(self) -> tuple[Tensor, bool]:
        """Returns the memory for the gradient, and whether the gradient must be added to values that are already
        there."""
        return self.engine.destination(self.unit, self.gradient, self.index)

    def serves(self, weight: nn.Parameter, input_: Tensor) -> bool:
        """Whether a call may use the functions below. It may not if a hook, a subclass or a caller needs the gradient,
        or if another tensor replaces the parameter (pruning, `torch.func.functional_call`)."""
        return (
            torch.is_grad_enabled()
            and weight is self.param
            and weight.requires_grad
            and type(input_) in (Tensor, nn.Parameter)
            and not _has_hooks(weight)
            and not torch.compiler.is_compiling()
        )


def install(engine: ZeroEngine, sinks: dict[int, Sink]) -> None:
    """Patches stock linear and embedding modules to use the functions below. `sinks`: by `id` of the weight."""
    forwards = {nn.Linear: _linear, nn.Embedding: _embedding}
    # GPT-2's linear module, whose weight is transposed; a model that has one has imported it
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if conv1d is not None:
        forwards[conv1d] = _conv1d
    for module in engine.model.modules():
        forward = forwards.get(type(module))
        if forward is None or "forward" in module.__dict__:
            continue
        sink = sinks.get(id(module.weight))
        if sink is None or module.weight.numel() < MIN_NUMEL:
            continue
        # on CUDA, `index_add_` adds rows in no fixed order, while the stock backward sorts them first
        if forward is not _embedding or (engine.comm.is_on_cpu and _is_plain(module)):
            engine.handles.append(Patch(module, "forward", partial(forward, module, sink)))


def uninstall(module: nn.Module) -> None:
    """Removes the patches of `install` from a block that will be compiled. With the patches, each block would need a
    separate graph."""
    for inner in module.modules():
        if getattr(inner.__dict__.get("forward"), "func", None) in (_linear, _conv1d, _embedding):
            del inner.forward


def _has_hooks(param: nn.Parameter) -> bool:
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def _is_plain(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _operand(sink: Sink, weight: nn.Parameter, input: Tensor) -> Tensor | None:
    """Returns the input for the functions below, or `None` if the stock module must be called."""
    dtype = autocast_dtype(input.device.type)
    if dtype is not None:
        if weight.dtype is not dtype:
            return None
        input = input.to(weight.dtype)
    return input if sink.serves(weight, input) and input.dtype is weight.dtype else None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns autocast's dtype, or `None` outside of autocast and on devices without it."""
    is_known = torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if is_known and torch.is_autocast_enabled(device_type) else None


def _linear(module: nn.Linear, sink: Sink, input: Tensor) -> Tensor:
    operand = _operand(sink, module.weight, input)
    if operand is None:
        return F.linear(input, module.weight, module.bias)
    return _Linear.apply(operand, module.weight, module.bias, sink)


def _conv1d(module: nn.Module, sink: Sink, input: Tensor) -> Tensor:
    operand = _operand(sink, module.weight, input)
    if operand is None:
        return type(module).forward(module, input)
    rows = _Conv1D.apply(operand.view(-1, operand.shape[-1]), module.weight, module.bias, sink)
    return rows.view(*input.shape[:-1], rows.shape[-1])


def _embedding(module: nn.Embedding, sink: Sink, input: Tensor) -> Tensor:
    if not sink.serves(module.weight, input):
        return F.embedding(input, module.weight, module.padding_idx)
    return _Embedding.apply(input, module.weight, module.padding_idx, sink)


def _put_product(sink: Sink, left: Tensor, right: Tensor) -> Tensor | None:
    """Writes or adds `left @ right`, a weight's gradient, to its destination, or returns it if a caller needs it."""
    if not sink.is_open():
        return left @ right
    destination, is_filled = sink.destination()
    if is_filled:
        destination.addmm_(left, right)
    else:
        torch.mm(left, right, out=destination)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, sink):
        ctx.save_for_backward(input, weight)
        ctx.sink = sink
        output = F.linear(input, weight, bias)
        # with three or more dimensions the output is a view, and autograd would refuse in-place writes to it
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = (rows @ weight).view(input.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        grad_weight = _put_product(ctx.sink, rows.t(), input.reshape(-1, input.shape[-1]))
        return grad_input, grad_weight, grad_bias, None


class _Conv1D(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, sink):
        ctx.save_for_backward(rows, weight)
        ctx.sink = sink
        return torch.addmm(bias, rows, weight)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        grad_rows = grad @ weight.t() if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_rows, _put_product(ctx.sink, rows.t(), grad), grad_bias, None


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
        destination, is_filled = ctx.sink.destination()
        if not is_filled:
            destination.zero_()
        rows, values = input.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding_idx is not None:
            kept = rows != ctx.padding_idx
            rows, values = rows[kept], values[kept]
        destination.index_add_(0, rows, values)
        return None, None, None, None
