"""Imports that are put off until something of them is used: of modules that transformers and torch import, and a plan
does not use, which took half of its time.

[Note: what stands for a module] In place of such a module comes one without contents. What a module imports from it
for itself, outside of functions, is a `_Later`; whatever else is asked of either imports the true one. Before that no
object of its classes exists, so it is known what `isinstance` says; and nothing is compiled, and no size is a symbol,
so it is known what some functions return (`PUT_OFF`). A name that does not stand in the source of the module is looked
for in the true one. What goes wrong all the same goes wrong once: the command is run again without this.
"""

import importlib
import os
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


# Whoever imports a module, or looks through all of them, asks for these.
_OF_ANY_MODULE = ("__cached__", "__file__", "__path__", "__wrapped__")
# Set in a process in which nothing is put off.
AT_ONCE = "HF_ZERO_IMPORT_AT_ONCE"


class _Later:
    """What a module has imported, by its `name`, from a `module` that is put off."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def _found(self) -> Any:
        return getattr(_FINDER.imported(self._module), self._name)

    @property
    def _is_put_off(self) -> bool:
        return _FINDER.root_of(self._module) is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._is_put_off:
            raise AttributeError(name)  # who asks looks for a kind of annotation
        return getattr(self._found(), name)

    def __call__(self, *args, **kwargs):
        return self._found()(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._found()[key]

    def __bool__(self) -> bool:
        return bool(self._found())

    def __eq__(self, other: object) -> bool:
        return self._found() == other

    def __hash__(self) -> int:
        return hash(self._found())

    def __str__(self) -> str:
        return str(self._found())

    def __or__(self, other: Any) -> Any:
        return Any  # it is a part of an annotation

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (self._found(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return not self._is_put_off and isinstance(instance, self._found())

    def __subclasscheck__(self, cls: type) -> bool:
        return not self._is_put_off and issubclass(cls, self._found())


def _unchanged(value: Any = None, *_, **__) -> Any:
    """A decorator that leaves a function as it is, or what is asked of a size that may be a symbol."""
    return _unchanged if value is None else value


def _are_equal(left: Any, right: Any) -> bool:
    are_shapes = isinstance(left, (tuple, list)) and isinstance(right, (tuple, list))
    return tuple(left) == tuple(right) if are_shapes else left == right


class _KnownSettings:
    """A module of settings, of which some are known as long as it is put off: nobody has changed them."""

    def __init__(self, module: str, **known: Any):
        vars(self).update(_module=module, _known=known)

    def __getattr__(self, name: str) -> Any:
        if name in self._known and _FINDER.root_of(self._module) is not None:
            return self._known[name]
        return getattr(_FINDER.imported(self._module), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_FINDER.imported(self._module), name, value)


_GUARDS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw")
# The modules, with what is known of them without an import.
PUT_OFF: dict[str, dict[str, Any]] = {
    "scipy": {},
    "sklearn": {},
    "sympy": {"Basic": _Later("sympy", "Basic")},
    "torchao": {},
    "torch._dynamo": {
        **dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unchanged),
        "config": _KnownSettings("torch._dynamo.config", error_on_nested_fx_trace=True),  # each checkpoint asks
        "graph_break": lambda: None,
    },
    "torch.distributed.tensor": {"DTensor": _Later("torch.distributed.tensor", "DTensor")},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys((*_GUARDS, "statically_known_true"), _unchanged),
        "free_unbacked_symbols": lambda _: set(),
        "has_guarding_hint": lambda _: True,
        "is_nested_int": lambda _: False,
        "sym_and": lambda *values: all(values),
        "sym_eq": _are_equal,
        "sym_or": lambda *values: any(values),
    },
    "torch.utils._sympy.functions": {"Max": _Later("torch.utils._sympy.functions", "Max")},
    "transformers.distributed.expert_parallel": {},
    "transformers.distributed.tensor_parallel": {},
}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that are put off, and those in them."""

    def __init__(self):
        self._roots = set(PUT_OFF)

    def root_of(self, name: str) -> str | None:
        """Returns the module that is put off, and that a module is or lies in; `None` where none is."""
        ends = [at for at, letter in enumerate(f"{name}.") if letter == "."]
        return next((name[:end] for end in ends if name[:end] in self._roots), None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = None if self.root_of(fullname) is None else PathFinder.find_spec(fullname, path)
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to do yet."""

    def imported(self, name: str) -> ModuleType:
        """Returns the true module."""
        root = self.root_of(name)
        if root is not None:
            self._roots.remove(root)
            deferred = [each for each, module in sys.modules.items() if isinstance(module, _Deferred)]
            for each in deferred:
                if self.root_of(each) is None:
                    module = sys.modules.pop(each)
                    for known in PUT_OFF.get(each, ()):
                        vars(module).pop(known, None)
        return importlib.import_module(name)


_FINDER = _Finder()


class _Deferred(ModuleType):
    """A module that is put off."""

    def __getattr__(self, name: str) -> Any:
        root = _FINDER.root_of(self.__name__)
        if root is not None:
            if name in _OF_ANY_MODULE:
                raise AttributeError(name)
            if root == self.__name__ and name in PUT_OFF[root]:
                return vars(self).setdefault(name, PUT_OFF[root][name])  # some ask at every operation
            if _asks_for_later() and re.search(rf"\b{re.escape(name)}\b", _source_of(self)):
                return _Later(self.__name__, name)
        return getattr(_FINDER.imported(self.__name__), name)


def _asks_for_later() -> bool:
    """Whether who asks is a module that is being imported, and not a function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return frame.f_code.co_name == "<module>"


def _source_of(module: ModuleType) -> str:
    path = Path((module.__spec__ and module.__spec__.origin) or "")
    return path.read_text(encoding="utf-8") if path.suffix == ".py" else ""


def put_off_imports() -> None:
    """Puts them off in this process, from now on, unless it is to import them at once."""
    if AT_ONCE not in os.environ:
        sys.meta_path.insert(0, _FINDER)


def run_again_at_once() -> None:
    """Runs this process from its beginning with all imports, if some were put off: one of these may be missed."""
    if _FINDER in sys.meta_path:
        os.environ[AT_ONCE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
