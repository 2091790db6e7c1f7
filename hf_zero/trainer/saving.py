"""A trainer's checkpoints: what Trainer writes is led into a temporary folder, and all of it appears at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.checkpoint import Checkpoint, Snapshots, plan_state
from hf_zero.checkpoint.save import Weights
from hf_zero.engine import ZeroEngine
from hf_zero.optim import ShardedOptimizer


class Saver:
    """The checkpoint that is being saved, and the one that a thread still writes.

    Args:
        in_background (`bool`): lets a thread write, after a copy.
    """

    def __init__(self, *, in_background: bool):
        self._snapshots = Snapshots() if in_background else None
        self._written: Checkpoint | None = None  # until it is waited for
        self._current: Checkpoint | None = None  # while Trainer writes its files
        self._newest: Path | None = None  # until one is complete
        self.last: Path | None = None  # what was written last, complete or not
        self._push: Callable[[], None] | None = None

    @property
    def run_dir(self) -> str | None:
        """Where Trainer is to write checkpoints while one is being saved."""
        return str(self._current.path.parent) if self._current is not None else None

    @property
    def folder(self) -> Path | None:
        """The name that the checkpoint will have that is being saved."""
        return self._current.folder if self._current is not None else None

    @property
    def is_saving(self) -> bool:
        return self._current is not None

    @contextmanager
    def in_foreground(self) -> Iterator[None]:
        """What is saved meanwhile is complete when `finish` returns, or raises there."""
        snapshots, self._snapshots = self._snapshots, None
        try:
            yield
        finally:
            self._snapshots = snapshots

    def begin(
        self, engine: ZeroEngine, optimizer: ShardedOptimizer | None, folder: str, *, weights: Weights | None, **facts
    ) -> Checkpoint:
        """Checks the space for a checkpoint and makes its temporary folder. Collective.

        Args:
            engine (`ZeroEngine`): the model.
            optimizer (`ShardedOptimizer`, *optional*): `None` to save the model alone.
            folder (`str`): the checkpoint.
            weights (`Weights`, *optional*): to be written by all ranks, beside what the caller puts into the folder.
            facts: for the manifest.
        """
        self._push = None  # of a checkpoint that could not be saved
        self._current = Checkpoint.begin(
            engine,
            folder,
            weights=weights,
            state=plan_state(engine, optimizer, **facts) if optimizer is not None else None,
        )
        return self._current

    def push_later(self, push: Callable[[], None]) -> None:
        """Uploads wait until the checkpoint is complete."""
        self._push = push

    def finish(self, after: Callable[[], None]) -> None:
        """Writes the tensors and gives the checkpoint its name, here or in the background; then comes `after`."""
        current, self._current = self._current, None
        assert current is not None, "finish without begin"
        self.last = current.folder
        current.finish(self._snapshots, after)
        self._written = current
        if self._snapshots is None:
            self.wait()

    def discard(self) -> None:
        """Gives up the checkpoint that was begun, after a failure."""
        current, self._current = self._current, None
        self._push = None
        if current is not None:
            current.discard()

    def wait(self) -> Path | None:
        """Returns when what was saved is complete, and uploads it where that was asked for.

        Returns:
            `Path` or `None`: the newest checkpoint.

        Raises:
            `CheckpointError`: it could not be saved; on all ranks.
        """
        written, self._written = self._written, None
        push, self._push = self._push, None
        if written is not None:
            written.wait()
            self._newest = written.folder
            if push is not None:
                push()
        return self._newest
