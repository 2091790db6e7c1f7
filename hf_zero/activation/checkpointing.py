"""Calls around gradient checkpointing.

transformers' models call blocks through `_gradient_checkpointing_func`, which `gradient_checkpointing_enable` puts
onto each module, at any time.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from hf_zero.engine.patch import Uncopyable


FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


class CheckpointFunction(Uncopyable):
    """A module's checkpoint function, such as `torch.utils.checkpoint.checkpoint`, with calls around it.

    Attributes:
        around (`list[Callable]`): the calls, the innermost first. Each is given what it is around, and its arguments.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.around: list[Callable] = []

    def __call__(self, block: Callable, *args, **kwargs):
        function = self.function
        for call in self.around:
            function = partial(call, function)
        return function(block, *args, **kwargs)


def put_around(modules: list[nn.Module], call: Callable) -> None:
    """Puts a call around the checkpoint functions of the modules that have one, unless it is there."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if function is None:
            continue
        if not isinstance(function, CheckpointFunction):
            function = module.__dict__[FUNCTION] = CheckpointFunction(function)
        if call not in function.around:
            function.around.append(call)


def take_off(modules: list[nn.Module], call: Callable) -> None:
    """Removes a call from around the checkpoint functions of some modules."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if isinstance(function, CheckpointFunction):
            function.around = [each for each in function.around if each != call]
            if not function.around:
                module.__dict__[FUNCTION] = function.function
