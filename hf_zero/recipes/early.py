"""What is wrong with a command line before torch and transformers are imported, which takes seconds."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.errors import CheckpointError, ConfigError, DataError
from hf_zero.recipes.deferred import put_off_imports
from hf_zero.recipes.parser import given_of, program, read_yaml


PACKAGE_PREFIX = "package:"
FILES = ("train_file", "test_file")
# Tools that are given a folder, and those that are given a folder or a hub id, under the key of their messages.
OF_FOLDERS = ("verify", "merge", "push")
OF_MODELS = {"plan": "model", "chat": "folder", "generate": "folder"}


def refuse_early(argv: list[str]) -> None:
    """Refuses a configuration or a file of rows that is not there."""
    given = given_of(argv, "config", *FILES)
    content = read_yaml(given["config"]) if given["config"] else {}
    for key in FILES:
        name = given[key] or content.get(key)
        if isinstance(name, str) and name:
            check_exists(name, key)


def refuse_missing(tool: str, argv: list[str]) -> None:
    """Refuses what a tool is to work on, and what is not there: the first word of a command line, or its `--config`.
    A name that may be a hub id is left to those who ask the hub."""
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if tool == "plan":
        refuse_early(argv)
        if name is not None and name.endswith((".yaml", ".yml")):
            raise ConfigError(f"model {name!r}: is a YAML file, as of a run; plan that with --config {name}")
    if name is None or Path(name).expanduser().exists():
        return
    if tool in OF_FOLDERS:
        raise CheckpointError(f"{Path(name)}: does not exist; give the folder of a saved model")
    if tool in OF_MODELS and looks_like_path(name):
        raise ConfigError(no_such_folder(name, OF_MODELS[tool]))


def looks_like_path(name: str) -> bool:
    """Whether the name of a model is neither a hub id nor that of a folder in a package."""
    if name.startswith(PACKAGE_PREFIX):
        return False
    return name.startswith((".", "/", "~")) or name.endswith(("/", ".json")) or name.count("/") > 1


def no_such_folder(name: str, key: str, remark: str = "") -> str:
    """Returns the message about a model that is not there, by the key that names it."""
    return (
        f"{key} {name!r}: no such folder{remark}; give a folder that from_pretrained loads, or package:<name>/<folder>"
    )


def check_exists(name: str, key: str) -> None:
    """Refuses a path of rows where nothing is."""
    if not Path(name).expanduser().exists():
        raise DataError(f"{name}: no such file; check {key}")


def put_off_unused(argv: list[str]) -> None:
    """Lets modules that a plan does not use be imported when it does after all, in a process just started for it."""
    if argv[:1] == ["plan"] and "torch" not in sys.modules:
        put_off_imports()


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Says to the terminal of a user, who waits, what takes so long, and leaves no garbage to be looked for in what is
    imported inside: its objects stay, and looking through them took a tenth of the time.

    Args:
        what (`str`): the task or tool that imports.
    """
    if "torch" in sys.modules or not gc.isenabled():  # what others have made may be garbage
        yield
        return
    if sys.stderr.isatty():
        print(f"{program()} {what}: importing torch and transformers", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extensions that are built with nanobind print what is left at the end
