"""Names of a package that bring their modules when they are first asked for."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_package(
    package: str, names_of: Mapping[str, Collection[str]], *, rooms: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package. What a name stands for is kept among the package's own names.

    Args:
        package (`str`): as Python names it.
        names_of (`Mapping[str, Collection[str]]`): of each module of the package, the public names in it.
        rooms (`Collection[str]`): modules that are attributes of the package without an import of their own.
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
