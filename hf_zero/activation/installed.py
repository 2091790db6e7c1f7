"""Base class of patches and hooks on a sharded model."""

from typing import Any, Self

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.patch import Uncopyable


class Installed(Uncopyable):
    """Patches and hooks on a sharded model. An instance is one of the engine's handles until `remove`."""

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._handles: list[Any] = []

    @classmethod
    def of(cls, engine: ZeroEngine) -> Self | None:
        """Returns the instance of this class among an engine's handles, or `None`."""
        return next((handle for handle in engine.handles if isinstance(handle, cls)), None)

    def remove(self) -> None:
        """Removes the patches and hooks in reverse order. Tensors in a store stay until their backward."""
        while self._handles:
            self._handles.pop().remove()
