"""The package with one wait left out: what the simulated accelerator has to notice.

A mutant is a statement that orders something (a wait, a synchronize, an event's record) and loses this call, or a
`Pending` that forgets what it would wait for. They are found in the syntax tree, so a new wait is a new mutant.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType


PACKAGE = Path(__file__).parents[2] / "hf_zero"
ROOMS = ("comm/bus.py", "comm/native.py", "engine", "optim", "activation", "storage", "checkpoint/staging.py")
ORDERING = {
    *("wait", "wait_stream", "wait_event", "record", "synchronize"),
    *("wait_for_all", "wait_for_jobs", "wait_for_all_gather", "wait_for_reductions", "wait_for_host"),
}


@dataclass(frozen=True)
class Mutant:
    """One line without which something is not ordered.

    Args:
        file (`str`): inside the package.
        line (`int`): where the expression begins.
        column (`int`): likewise.
        function (`str`): the function or method, by its name in the module.
        source (`str`): what is deleted.
    """

    file: str
    line: int
    column: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.source}"


def mutants() -> list[Mutant]:
    """All of the package."""
    found = []
    for room in ROOMS:
        path = PACKAGE / room
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = str(file.relative_to(PACKAGE))
            tree = ast.parse(file.read_text())
            found += [Mutant(name, *_place(node), function, ast.unparse(node)) for function, node in _targets(tree)]
    return found


def _targets(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The nodes to delete, each with the name of the outermost function around it."""
    for outer in tree.body:
        members = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for function in members:
            if isinstance(function, ast.FunctionDef):
                name = function.name if function is outer else f"{outer.name}.{function.name}"
                yield from ((name, node) for node in ast.walk(function) if _orders(node))


def _orders(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Attribute) and node.value.func.attr in ORDERING
    is_pending = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pending"
    return is_pending and bool(node.args)


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


class _Delete(ast.NodeTransformer):
    def __init__(self, mutant: Mutant):
        self._place = (mutant.line, mutant.column)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _orders(node) and _place(node) == self._place:
            node.value = node.value.func.value  # what is waited for still happens
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _orders(node) and _place(node) == self._place:
            node.args = []
        return self.generic_visit(node)


@cache
def _module_of(mutant: Mutant) -> ModuleType:
    return importlib.import_module("hf_zero." + mutant.file.removesuffix(".py").replace("/", "."))


def _function_of(namespace: dict, name: str) -> FunctionType:
    owner, _, attribute = name.rpartition(".")
    found = inspect.getattr_static(namespace[owner], attribute) if owner else namespace[name]
    found = getattr(found, "__func__", getattr(found, "fget", found))
    return inspect.unwrap(found)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Runs the package without that line, in this process."""
    module = _module_of(mutant)
    tree = ast.fix_missing_locations(_Delete(mutant).visit(ast.parse(Path(module.__file__).read_text())))
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(tree, module.__file__, "exec"), namespace)
    function, changed = _function_of(vars(module), mutant.function), _function_of(namespace, mutant.function)
    original, function.__code__ = function.__code__, changed.__code__
    try:
        yield
    finally:
        function.__code__ = original
