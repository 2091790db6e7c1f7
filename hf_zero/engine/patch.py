"""Patches and hooks that the engine puts onto a user's objects, and that can be removed."""

from functools import update_wrapper

from torch import nn

from hf_zero.errors import UnsupportedError


UNCOPYABLE = (
    "a sharded model or a part of it cannot be copied or pickled: copy it before it is sharded, or after "
    "hf_zero.ShardedModel(model).unshard(), or save it with hf_zero.save_pretrained(model, folder)"
)


class Uncopyable:
    """An object that belongs to one process. The blocks' modules refer to it, so that copying one is refused."""

    def __reduce_ex__(self, protocol):
        raise UnsupportedError(UNCOPYABLE)


class Patch:
    """An attribute that is set on one object and hides the former one until it is removed."""

    def __init__(self, owner, name: str, value):
        self._owner, self._name = owner, name
        self._before = {key: own for key, own in owner.__dict__.items() if key == name}
        owner.__dict__[name] = value

    def remove(self) -> None:
        """Puts the former value back. Several patches of one attribute are removed in the opposite order."""
        self._owner.__dict__.pop(self._name, None)
        self._owner.__dict__.update(self._before)


class NodeHook:
    """A hook on a node of autograd's graph. The node lives as long as this object."""

    def __init__(self, node, hook):
        self.node = node
        self._handle = node.register_hook(hook)

    def remove(self) -> None:
        self._handle.remove()


class ForwardGuard(Uncopyable):
    """Turns calls of `module.forward(...)`, which would skip all hooks, into calls of `module(...)`."""

    def __init__(self, module: nn.Module):
        update_wrapper(self, module.forward)  # whose signature is looked at
        self.forward = module.forward
        self._module = module
        self._is_open = False  # hooks have run before the call to come

    @classmethod
    def build(cls, module: nn.Module) -> list:
        """Puts a guard before a module's forward, and returns the patches that it consists of."""
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
