"""argparse that raises instead of exiting, for tasks and tools alike."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from hf_zero.errors import ConfigError, nearest
from hf_zero.recipes.other_names import COMMANDS, KEYS, elsewhere


SCRIPT = "hf-zero"
MODULE = "python -m hf_zero.recipes"


def program() -> str:
    """How this process was called, for usage and for commands that the user is told to run."""
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else MODULE


class Parser(ArgumentParser):
    """An `ArgumentParser` that raises [`ConfigError`] where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser_for(kinds: Iterable[type], **settings: Any) -> Parser:
    """Makes a parser that takes the fields of dataclasses as keys.

    Args:
        kinds (`Iterable[type]`): The dataclasses. If none has a field, transformers is not imported, which takes
            seconds.
        settings: Those of `ArgumentParser`.

    Returns:
        [`Parser`]: It is an `HfArgumentParser` too if there is a field.
    """
    kinds = tuple(kinds)
    if not any(fields(kind) for kind in kinds):
        return Parser(**settings)
    from transformers import HfArgumentParser

    class DataclassParser(Parser, HfArgumentParser):
        """The `error` of the first, the rest of the second."""

    make: Callable[..., Parser] = DataclassParser  # its second base has the constructor
    return make(kinds, **settings)


def unknown_message(where: str, key: str, known: Iterable[str]) -> str:
    """What to say about a key that nobody knows.

    Args:
        where (`str`): the file it was found in, or "command line".
        key (`str`): as it was written.
        known (`Iterable[str]`): the keys that there are; what does the same here, or the nearest, is named.
    """
    if not key.startswith("-") and where == "command line":
        remedy = f"--config {key}" if Path(key).suffix in (".yaml", ".yml") else "--key value"
        return f"{where}: {key!r} belongs to no key; write {remedy}"
    name = key.lstrip("-").replace("-", "_")
    found = nearest(name, known)
    hint = elsewhere(name, KEYS) or _guess(f"--{found}" if found and key.startswith("--") else found)
    return f"{where}: unknown key {key!r}; {hint}"


def unknown_task_message(name: str, known: Iterable[str]) -> str:
    """What to say about a task or tool that there is not.

    Args:
        name (`str`): as it was written.
        known (`Iterable[str]`): those that there are.
    """
    hint = f"{elsewhere(name, COMMANDS) or _guess(nearest(name, known))};".replace("?;", "?")
    return f"task {name!r}: {hint} expected one of {', '.join(known)}"


def _guess(found: str | None) -> str:
    return f"did you mean {found}?" if found else "nothing here is called like it; see --help"
