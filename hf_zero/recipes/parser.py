"""argparse that raises instead of exiting, for tasks and tools alike."""

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from transformers import HfArgumentParser

from hf_zero.errors import ConfigError


SCRIPT = "hf-zero"
MODULE = "python -m hf_zero.recipes"


def program() -> str:
    """How this process was called, for usage and for commands that the user is told to run."""
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else MODULE


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known`, one at least, that is written most like `name`."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


class Parser(HfArgumentParser):
    """An `HfArgumentParser` that raises [`ConfigError`] where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def unknown_message(where: str, key: str, known: Iterable[str]) -> str:
    """What to say about a key that nobody knows.

    Args:
        where (`str`): the file it was found in, or "command line".
        key (`str`): as it was written.
        known (`Iterable[str]`): the keys that there are, one at least; the nearest one is named.
    """
    if not key.startswith("-") and where == "command line":
        return f"{where}: {key!r} belongs to no key; write --key value"
    dashes = "--" if key.startswith("--") else ""
    return f"{where}: unknown key {key!r}; did you mean {dashes}{nearest(key.lstrip('-').replace('-', '_'), known)}?"
