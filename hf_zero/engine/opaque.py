"""Parameters whose class defines the meaning of their bytes, such as quantized weights. They are moved, never cast.

Additional tensors of such a parameter (scales, codes) are small and stay on every rank.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.engine.away import class_of
from hf_zero.engine.divided import is_dtensor, local_of
from hf_zero.engine.patch import Patch


def is_opaque(param: nn.Parameter) -> bool:
    """Whether a parameter's class, and not its dtype, defines the meaning of its bytes."""
    return class_of(param) is not nn.Parameter and not is_dtensor(param)


def can_be_moved(param: nn.Parameter) -> bool:
    """Whether all bytes of a parameter are in one dense tensor, so that it can be sharded and gathered.

    Trainable opaque parameters and classes that wrap other tensors do not guarantee that.
    """
    if type(local_of(param)) is not Tensor or param.layout is not torch.strided:
        return False
    return not is_opaque(param) or (not param.requires_grad and param.is_contiguous())


def is_reordered(param: nn.Parameter) -> bool:
    """Whether bitsandbytes has reordered 4-bit weights for the CPU. Gradients cannot pass through them then (0.50)."""
    return getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False)


def num_weights(param: nn.Parameter) -> int:
    """Returns the number of weights in a parameter. In 4 bits, two weights share a byte."""
    shape = getattr(getattr(param, "quant_state", None), "shape", None)
    return param.numel() if shape is None else prod(shape)


def is_alias(tensor: Tensor, param: nn.Parameter) -> bool:
    """Whether a tensor shares the memory of a parameter's data."""
    return tensor.untyped_storage()._cdata == param.untyped_storage()._cdata


def tensors_beside(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among a parameter's attributes, also inside attributes that are objects of its library."""
    library = type(value).__module__.partition(".")[0]
    for each in vars(value).values():
        if isinstance(each, Tensor):
            yield each
        elif type(each).__module__.partition(".")[0] == library and not isinstance(each, nn.Module):
            yield from tensors_beside(each)


class Companions:
    """Tensors among an opaque parameter's attributes (`scales`: at any depth). The parameter's layer may remove them
    at its first use, so they are restored together with the data."""

    def __init__(self, param: nn.Parameter):
        self._param = param
        tensors = {name: value for name, value in vars(param).items() if isinstance(value, Tensor)}
        self._aliases = [name for name, value in tensors.items() if is_alias(value, param)]
        self._others = {name: value for name, value in tensors.items() if name not in self._aliases}
        self.scales = [tensor for tensor in tensors_beside(param) if not is_alias(tensor, param)]

    def follow(self) -> None:
        """Restores the tensors after the parameter's data was replaced."""
        vars(self._param).update(self._others, **dict.fromkeys(self._aliases, self._param.data))


def companions_of(params: list[nn.Parameter]) -> list[Companions]:
    """Returns the companions of the opaque parameters."""
    return [Companions(param) for param in params if is_opaque(param)]


def unpack_layers(model: nn.Module) -> list[Patch]:
    """Restores bitsandbytes' layers to their form before the first use, and prevents them from reordering weights.

    The 8-bit layer takes the bytes out of its parameter. The 4-bit layer reorders them in its first evaluation on CPUs
    with AVX512-BF16, see `is_reordered`. Returns the patches that prevent it, to be removed when the model is
    unsharded.
    """
    patches = []
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes."):
            continue
        if hasattr(module, "support_avx512bf16_for_cpu"):
            patches.append(Patch(module, "support_avx512bf16_for_cpu", False))
        state = getattr(module, "state", None)
        if getattr(state, "CB", None) is not None:
            module.weight.CB, module.weight.SCB = state.CB, state.SCB
            state.CB = state.SCB = None
    return patches
