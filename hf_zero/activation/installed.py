"""What is put onto a sharded model for its activations, and taken off again."""

from typing import Any, Self

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.patch import Uncopyable


class Installed(Uncopyable):
    """Patches and hooks on a sharded model, one of the engine's handles until they are removed."""

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._handles: list[Any] = []

    @classmethod
    def of(cls, engine: ZeroEngine) -> Self | None:
        """Returns the one of this class among an engine's handles, or `None`."""
        return next((handle for handle in engine.handles if isinstance(handle, cls)), None)

    def remove(self) -> None:
        """Takes them off, the last one first. What is in a store stays until its backward."""
        while self._handles:
            self._handles.pop().remove()
