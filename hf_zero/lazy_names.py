"""Names of a package that bring their modules when they are first asked for."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazy_attribute(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Imports the module that has a name, and keeps what it is among the package's own names.

    Args:
        package (`str`): as Python names it.
        modules (`Mapping[str, str]`): of each such name, the module of the package that has it.
        name (`str`): what is asked for.

    Raises:
        AttributeError: it is none of these names.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = getattr(import_module(f"{package}.{modules[name]}"), name)
    vars(sys.modules[package])[name] = found
    return found
