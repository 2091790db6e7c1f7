"""Lazy imports: a package imports the module of a public name on first access."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_package(
    package: str, names_of: Mapping[str, Collection[str]], *, rooms: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package. Imported values are stored in the package's namespace.

    Args:
        package (`str`): Full name of the package.
        names_of (`Mapping[str, Collection[str]]`): The public names by module of the package.
        rooms (`Collection[str]`): Submodules that are imported on access as attributes of the package.
    """
    own = vars(sys.modules[package])
    modules = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = getattr(import_module(f"{package}.{modules[name]}"), name)
        return own[name]

    return get, lambda: sorted({*own, *modules, *rooms})
