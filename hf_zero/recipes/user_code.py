"""Functions in Python files of the user's, which a key names as `file.py:function`: rewards, metrics."""

import hashlib
import importlib.util
import symtable
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_zero.errors import ConfigError


def check_function(key: str, name: str, also: Sequence[str] = ()) -> None:
    """Refuses a function, named as `file.py:function`, that is not there. None of the user's code runs: this may be
    the launcher. `also` are names that the key takes, too, for the message."""
    path, function = _file_and_function(name)
    if path.suffix != ".py" or not function:
        names = f"one of {', '.join(also)}, or " if also else ""
        raise ConfigError(f"{key} {name!r}: expected {names}file.py:function")
    if not path.is_file():
        raise ConfigError(f"{key} {name}: there is no file {path}; give where it is")
    try:
        source = importlib.util.decode_source(path.read_bytes())
        symbols = symtable.symtable(source, "<unknown>", "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key} {name}: {path} is not valid Python ({error}); correct it") from error
    if not any(each.get_name() == function and (each.is_assigned() or each.is_imported()) for each in symbols):
        raise ConfigError(f"{key} {name}: {path} has no function {function!r}; give the name of one")


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Loads a function. Exceptions of the user's module are raised as they are."""
    path, function = _file_and_function(name)
    found = getattr(_module_of(path.resolve()), function, None)
    if not callable(found):
        raise ConfigError(f"{key} {name}: {function!r} is no function there; give the name of one")
    return found


def _file_and_function(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    return Path(file).expanduser(), function


@cache
def _module_of(path: Path) -> ModuleType:
    """Imports a file, which may import others in its folder, like a script."""
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # files of other folders may have the same name
    spec = importlib.util.spec_from_file_location(f"hf_zero_user_{path.stem}_{digest}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for what looks its own module up, such as dataclasses
    spec.loader.exec_module(module)
    return module


def metrics_of(name: str | None) -> Callable[[Any], Mapping[str, float]]:
    """Loads the function that `compute_metrics` names; one that gives no metrics if it is not set."""
    if not name:
        return lambda predictions: {}
    function = load_function("compute_metrics", name)

    def metrics(*args: Any, **kwargs: Any) -> dict[str, float]:
        # on all ranks: the log of rank 0 alone would raise for other values
        found = function(*args, **kwargs)
        if not isinstance(found, Mapping):
            raise TypeError(f"it gave a {type(found).__name__}, expected a dict of names and numbers")
        return {str(metric): float(value) for metric, value in found.items()}

    return metrics
