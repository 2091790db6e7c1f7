"""A checkpoint as a whole: model folder and state in one, under its final name when it is complete, or not at all."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_zero.checkpoint.folders import remove_replaced, take_name
from hf_zero.checkpoint.interfaces import Engine, Optimizer
from hf_zero.checkpoint.save import Weights, plan_weights
from hf_zero.checkpoint.snapshot import Snapshots
from hf_zero.checkpoint.staging import Staged, StagedFiles, connected
from hf_zero.checkpoint.state import State, plan_state
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.engine import Sharded, require_engine


logger = logging.getLogger(__name__)


def save_checkpoint(
    model: Sharded,
    optimizer: Optimizer | None,
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str = "50GB",
    background: Snapshots | None = None,
    **facts,
) -> "Checkpoint":
    """Saves a model folder with its optimizer's state, as one: `folder` appears when it is complete and on disk.

    Collective. Every rank writes its own ranges of the files; a folder of that name is replaced. On hosts that do not
    share the file system each gets the whole.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer ([`Optimizer`], *optional*): its optimizer; without it no state is written.
        folder (`str` or `os.PathLike`): the checkpoint.
        max_shard_size (`int` or `str`): bytes of tensors in one file, such as `"5GB"`.
        background ([`Snapshots`], *optional*): copies the values and lets a thread write them; give the same object
            to every save, which reuses its memory. The next save waits for this one.
        facts: `step`, `loss`, `grad_norm` and `extra` of the manifest.

    Returns:
        [`Checkpoint`]: to `wait` for, which raises what went wrong in the background.

    Raises:
        `CheckpointError`: no room, no permission, or the system refused a write. Nothing is left, and nothing lost.
    """
    engine = require_engine(model)
    checkpoint = Checkpoint.begin(
        engine,
        folder,
        weights=plan_weights(engine, max_shard_size=max_shard_size),
        state=None if optimizer is None else plan_state(engine, optimizer, **facts),
    )
    checkpoint.finish(background)
    return checkpoint


class Checkpoint:
    """A checkpoint that is being saved: from `begin` to `finish`, small files may be written into its `path`.

    Args:
        staged (`Staged`): its temporary folder.
        parts (`Sequence[StagedFiles]`): its safetensors files.
        state (`State`, *optional*): whose manifest closes it.
    """

    def __init__(self, staged: Staged, parts: Sequence[StagedFiles], state: State | None):
        self._staged = staged
        self._parts = list(parts)
        self._state = state
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @classmethod
    def begin(
        cls, engine: Engine, folder: str | os.PathLike, *, weights: Weights | None, state: State | None
    ) -> "Checkpoint":
        """Checks the space, and makes the temporary folder, with the model's configuration in it. Collective.

        Args:
            engine ([`Engine`]): the sharded model.
            folder (`str` or `os.PathLike`): the checkpoint.
            weights (`Weights`, *optional*): what `plan_weights` gives; `None` where the caller writes them.
            state (`State`, *optional*): what `plan_state` gives.
        """
        parts = [part.part for part in (weights, state) if part is not None]
        staged = Staged.open(connected(engine.comm), folder, parts)
        if weights is not None:
            staged.write_beside(weights.write_beside)
        return cls(staged, parts, state)

    @property
    def path(self) -> Path:
        """The temporary folder."""
        return self._staged.path

    @property
    def folder(self) -> Path:
        """The checkpoint's own name."""
        return self._staged.destination

    def finish(self, background: Snapshots | None = None, after: Callable[[], None] | None = None) -> None:
        """Writes the tensors and gives the folder its name, on this thread or on another.

        Args:
            background ([`Snapshots`], *optional*): see `save_checkpoint`.
            after (`Callable`, *optional*): called by one rank of each file system when the folder is complete in all.
        """
        if background is None:
            self._write(after)
            return
        comm = self._staged.comm
        try:
            self._parts = run_on_all_ranks(comm, f"copying {self.folder}", lambda: background.take(self._parts))
        except BaseException:
            self._staged.discard()
            raise
        comm.user = self  # until it is waited for, by the caller or by the next save
        self._thread = threading.Thread(target=self._write_aside, args=(after,), name=f"saving {self.folder.name}")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            `CheckpointError`: it could not be saved; on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = self._staged.comm.user = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Gives the checkpoint up before `finish`."""
        self._staged.discard()

    def _write_aside(self, after: Callable[[], None] | None) -> None:
        try:
            self._write(after)
        except BaseException as error:
            logger.error("hf_zero: %s", error)  # at once; it is raised when the checkpoint is waited for
            self._failure = error

    def _write(self, after: Callable[[], None] | None) -> None:
        self._staged.write(self._parts)
        if self._state is not None:
            self._staged.write_beside(self._state.write_manifest)

        def replaced() -> None:
            remove_replaced(self.folder)
            if after is not None:
                after()

        self._staged.publish(lambda path: take_name(path, self.folder), after=replaced)
