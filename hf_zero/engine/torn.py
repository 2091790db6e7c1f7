"""Torn values: what gave them new ones broke off, so that a part is new and the rest is not. No rank saves them.

Of parameters and buffers `engine.torn` says it by name, of the optimizer's state `torn` of the optimizer. So each
load, by whichever way, drops the notes of what it has loaded, and of nothing else; a new optimizer has none.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.flat import Flat
    from hf_zero.engine.model_units import ModelUnits


logger = logging.getLogger(__name__)

STEP = "an optimizer step"
IN_BACKWARD = "an update in backward"  # some units have its values, until a whole step was taken
WRITEBACK = "hf_zero.gathered(writeback=True)"


@contextmanager
def noted(engine: "ModelUnits", what: str = STEP) -> Iterator[None]:
    """Notes that the trained parameters and the optimizer's state are torn, if the context does not come to its end.
    `what`: what changes them, the beginning of the message."""
    try:
        yield
    except BaseException:
        note(engine, what)
        logger.warning("hf_zero: %s broke off; nothing is saved before a whole checkpoint was loaded", what)
        raise


def note(engine: "ModelUnits", what: str) -> None:
    """Notes that the trained parameters and the optimizer's state are torn, where nothing else was noted before."""
    note_flats(engine.torn, [flat for flat in engine.flats if flat.trainable], what)
    optimizer = engine.newest_optimizer
    if optimizer is not None and optimizer.torn is None:
        optimizer.torn = what


def note_flats(notes: dict[str, str], flats: Iterable["Flat"], what: str) -> None:
    """Notes that the parameters of some buffers are torn, where nothing else was noted before."""
    for name in (info.name for flat in flats for info in flat.infos):
        notes.setdefault(name, what)


def drop_flats(notes: dict[str, str], flats: Iterable["Flat"], what: str) -> None:
    """Drops those notes of some buffers' parameters that say `what`, which has been made good since."""
    for name in (info.name for flat in flats for info in flat.infos) if notes else ():
        if notes.get(name) == what:
            del notes[name]


def drop(engine: "ModelUnits", what: str) -> None:
    """Drops all notes that say `what`, which has been made good since."""
    drop_flats(engine.torn, engine.flats, what)
    optimizer = engine.newest_optimizer
    if optimizer is not None and optimizer.torn == what:
        optimizer.torn = None


def refuse(engine: "ModelUnits") -> None:
    """Refuses to save torn values."""
    for name, what in engine.torn.items():
        raise LifecycleError(
            f"saving: {what} broke off, so a part has its values and the rest not ({name}, {len(engine.torn)} in "
            "all); load them anew with hf_zero.load_weights, or with model.load_state_dict on all ranks inside "
            "`with hf_zero.gathered(model, writeback=True):`, or load a whole checkpoint"
        )
    optimizer = engine.newest_optimizer
    if optimizer is not None and optimizer.torn is not None:
        raise LifecycleError(
            f"saving: {optimizer.torn} broke off, so a part of the optimizer's state has its values and the rest not; "
            "load a whole checkpoint, or make a new optimizer"
        )
