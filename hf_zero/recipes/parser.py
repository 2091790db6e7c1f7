"""argparse that raises instead of exiting, for tasks and tools alike."""

import difflib
from collections.abc import Iterable
from typing import NoReturn

from transformers import HfArgumentParser

from hf_zero.errors import ConfigError


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
    nearest = difflib.get_close_matches(key.lstrip("-").replace("-", "_"), sorted(known), n=1, cutoff=0.0)[0]
    dashes = "--" if key.startswith("--") else ""
    return f"{where}: unknown key {key!r}; did you mean {dashes}{nearest}?"
