"""What stands for a module's forward, so that nobody passes the hooks by."""

from functools import update_wrapper

from torch import nn

from hf_zero.engine.patch import Patch
from hf_zero.engine.unit import Uncopyable


class Entrance(Uncopyable):
    """Leads those who call `module.forward(...)`, as some models do with their blocks, through `module(...)`.

    Args:
        module (`nn.Module`): with hooks.
    """

    def __init__(self, module: nn.Module):
        update_wrapper(self, module.forward)  # whose signature is looked at
        self.forward = module.forward
        self._module = module
        self._is_open = False  # hooks have run before the call to come

    @classmethod
    def build(cls, module: nn.Module) -> list:
        """Puts an entrance before a module's forward; gives all that is to be removed again."""
        entrance = cls(module)
        return [
            Patch(module, "forward", entrance),
            module.register_forward_pre_hook(entrance.open),
            module.register_forward_hook(entrance.close, always_call=True),
        ]

    def __call__(self, *args, **kwargs):
        if not self._is_open:
            return self._module(*args, **kwargs)
        self._is_open = False
        return self.forward(*args, **kwargs)

    def open(self, *_) -> None:
        self._is_open = True

    def close(self, *_) -> None:
        self._is_open = False
