"""The only place of `benchmarks.checkpoint` that calls hf_zero's checkpoints: a change of theirs ends here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import hf_zero


class Handle(Protocol):
    """A save that may still be going on."""

    def wait(self) -> Any:
        """Returns when the checkpoint is complete; on every rank, and raises what went wrong meanwhile."""


def save_weights(engine, folder: Path) -> None:
    """Returns when `folder` is one that `from_pretrained` loads."""
    hf_zero.save_pretrained(engine, folder)


def save_optimizer(engine, optimizer, folder: Path) -> None:
    hf_zero.save_state(engine, optimizer, folder)


def save_whole(engine, optimizer, folder: Path) -> Handle:
    """Weights and optimizer state as one folder, which appears when all of it is on disk."""
    return hf_zero.save_checkpoint(engine, optimizer, folder)


_SNAPSHOTS = hf_zero.Snapshots()  # memory that every save in the background uses again


def save_in_background(engine, optimizer, folder: Path) -> Handle:
    """The same; returns when training may go on."""
    return hf_zero.save_checkpoint(engine, optimizer, folder, background=_SNAPSHOTS)


def load_model(model_class: type, folder: Path):
    """The model without its weights: every rank reads its own ranges when it is sharded."""
    return hf_zero.load_pretrained(model_class, folder)


def load_optimizer(engine, optimizer, folder: Path) -> None:
    hf_zero.load_state(engine, optimizer, folder)
