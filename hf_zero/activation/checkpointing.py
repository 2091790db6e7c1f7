"""Wrappers around the checkpoint functions of transformers' models."""

from collections.abc import Callable
from functools import partial

from torch import nn

from hf_zero.engine.patch import Uncopyable


FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


class CheckpointFunction(Uncopyable):
    """A module's checkpoint function, such as `torch.utils.checkpoint.checkpoint`, with wrappers.

    Attributes:
        around (`list[Callable]`): The wrappers, innermost first. Each is called with the wrapped function and its
            arguments.
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
    """Adds a wrapper to the modules' checkpoint functions, unless they have it already."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if function is None:
            continue
        if not isinstance(function, CheckpointFunction):
            function = module.__dict__[FUNCTION] = CheckpointFunction(function)
        if call not in function.around:
            function.around.append(call)


def take_off(modules: list[nn.Module], call: Callable) -> None:
    """Removes a wrapper from the modules' checkpoint functions."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if isinstance(function, CheckpointFunction):
            function.around = [each for each in function.around if each != call]
            if not function.around:
                module.__dict__[FUNCTION] = function.function
