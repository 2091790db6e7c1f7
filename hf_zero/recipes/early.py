"""What is wrong with a command line before torch and transformers are imported, which takes seconds."""

import sys
from pathlib import Path

from hf_zero.errors import DataError
from hf_zero.recipes.parser import given_of, program, read_yaml


FILES = ("train_file", "test_file")


def refuse_early(argv: list[str]) -> None:
    """Refuses a configuration or a file of rows that is not there.

    Args:
        argv (`list[str]`): what follows the task.

    Raises:
        ConfigError: `--config` names no file that can be read.
        DataError: a file of rows is missing.
    """
    given = given_of(argv, "config", *FILES)
    content = read_yaml(given["config"]) if given["config"] else {}
    for key in FILES:
        name = given[key] or content.get(key)
        if isinstance(name, str) and name:
            check_exists(name, key)


def check_exists(name: str, key: str) -> None:
    """Refuses a path of rows where nothing is.

    Args:
        name (`str`): the path.
        key (`str`): what the user calls this setting.

    Raises:
        DataError: naming both.
    """
    if not Path(name).expanduser().exists():
        raise DataError(f"{name}: no such file; check {key}")


def say_importing(what: str) -> None:
    """Says to the terminal of a user, who waits, what takes so long."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        print(f"{program()} {what}: importing torch and transformers", file=sys.stderr, flush=True)
