"""Removable patches and hooks that the engine installs on a user's objects."""

from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from hf_zero.errors import UnsupportedError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine

UNCOPYABLE = (
    "a sharded model or a part of it cannot be copied or pickled; copy it before sharding or after "
    "hf_zero.ShardedModel(model).unshard(), or save it with hf_zero.save_pretrained(model, folder)"
)


class Uncopyable:
    """An object that cannot be copied or pickled. Modules of sharded models refer to one, so copying them raises."""

    def __reduce_ex__(self, protocol):
        raise UnsupportedError(UNCOPYABLE)


class Patch:
    """Sets an attribute of an object and restores the previous value when it is removed."""

    def __init__(self, owner, name: str, value):
        self._owner, self._name = owner, name
        self._before = {key: own for key, own in owner.__dict__.items() if key == name}
        owner.__dict__[name] = value

    def remove(self) -> None:
        """Restores the previous value. Remove several patches of one attribute in reverse order."""
        self._owner.__dict__.pop(self._name, None)
        self._owner.__dict__.update(self._before)


class Installed(Uncopyable):
    """Patches and hooks on a sharded model. An instance is one of the engine's handles until `remove`."""

    def __init__(self, engine: "ZeroEngine"):
        self._engine = engine
        self._handles: list[Any] = []

    @classmethod
    def of(cls, engine: "ZeroEngine") -> Self | None:
        """Returns the instance of this class among an engine's handles, or `None`."""
        return next((handle for handle in engine.handles if isinstance(handle, cls)), None)

    def remove(self) -> None:
        """Removes the patches and hooks in reverse order."""
        while self._handles:
            self._handles.pop().remove()


class NodeHook:
    """A hook on a node of the autograd graph. This object keeps the node alive."""

    def __init__(self, node, hook):
        self.node = node
        self._handle = node.register_hook(hook)

    def remove(self) -> None:
        self._handle.remove()


class ForwardGuard(Uncopyable):
    """Turns calls of `module.forward(...)`, which would skip all hooks, into calls of `module(...)`."""

    def __init__(self, module: nn.Module):
        update_wrapper(self, module.forward)  # keeps the signature, which libraries inspect
        self.forward = module.forward
        self._module = module
        self._is_open = False  # hooks have already run for the next call

    @classmethod
    def build(cls, module: nn.Module) -> list:
        """Installs a guard on a module's forward and returns its patches and hooks."""
        guard = cls(module)
        return [
            Patch(module, "forward", guard),
            module.register_forward_pre_hook(guard.open),
            module.register_forward_hook(guard.close, always_call=True),
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
