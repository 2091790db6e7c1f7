"""Torn values: what gave them new ones broke off, so that a part is new and the rest is not. No rank saves them.

Of parameters and buffers `engine.torn` says it by name, of the optimizer's state `torn` of the optimizer. So each
load, by whichever way, drops the notes of what it has loaded, and of nothing else; a new optimizer has none.
"""

from collections.abc import Iterable

from hf_zero.engine.flat import Flat


STEP = "an optimizer step"
IN_BACKWARD = "an update in backward"  # some units have its values, until a whole step was taken
WRITEBACK = "hf_zero.gathered(writeback=True)"


def note(notes: dict[str, str], flats: Iterable[Flat], what: str) -> None:
    """Notes that the parameters of some buffers are torn, where nothing else was noted before."""
    for name in (info.name for flat in flats for info in flat.infos):
        notes.setdefault(name, what)


def drop(notes: dict[str, str], flats: Iterable[Flat], what: str) -> None:
    """Drops those notes of some buffers' parameters that say `what`, which has been made good since."""
    for name in (info.name for flat in flats for info in flat.infos) if notes else ():
        if notes.get(name) == what:
            del notes[name]
