"""The package with one wait left out: what the simulated accelerator has to notice.

A mutant is a place that orders something: a call that waits, records an event, or keeps memory until its last use is
over; a function handed on that would wait; a `Pending` with something to wait for. They are found in the syntax tree,
so a new wait is a new mutant. All but the waiting itself still happens in it.
"""

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType


PACKAGE = Path(__file__).parents[2] / "hf_zero"
ROOMS = ("comm", "engine", "optim", "activation", "storage", "checkpoint")
NO_ROOM = {"comm/loopback.py"}  # ranks that are threads, by which a machine is checked: nothing trains on them
ORDERING = {
    *("wait", "wait_stream", "wait_event", "record", "record_stream", "synchronize", "synchronize_before_end"),
    *("memory_barrier", "fence"),
    *("wait_for_all", "wait_for_jobs", "wait_for_all_gather", "wait_for_reductions", "wait_for_host"),
    *("_wait_for_conflicts", "_wait_for_oldest", "_wait_for_readers", "wait_for_copies"),
    *("_finish", "barrier"),
    *("result", "join"),  # of jobs and threads
    "receive_until",  # messages between ranks of one host
    *("hold", "_land", "_give_up"),  # what keeps memory until its last use, and what gives it up then
}
# The tape of a forward; a collective of the backend, as others are that move values.
NOT_ORDERING = {"self._schedule.record", "dist.barrier"}


@dataclass(frozen=True)
class Mutant:
    """One line without which something is not ordered.

    Args:
        file (`str`): inside the package.
        line (`int`): where the expression begins.
        column (`int`): likewise.
        function (`str`): the function or method, by its name in the module.
        source (`str`): what is deleted.
        callee (`str`): what is called there, without arguments.
        is_statement (`bool`): or part of an expression.
        count (`int`): how many with the same callee come before it in that function.
    """

    file: str
    line: int
    column: int
    function: str
    source: str
    callee: str
    is_statement: bool
    count: int = 0

    def __str__(self) -> str:
        """Its name, which stays when lines, arguments or files of other functions change."""
        return f"{self.function}: {self.callee}" + (f" ({self.count + 1})" if self.count else "")


@cache
def mutants() -> tuple[Mutant, ...]:
    """All of the package."""
    found: dict[tuple[str, str], list[Mutant]] = {}
    for room in ROOMS:
        path = PACKAGE / room
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = str(file.relative_to(PACKAGE))
            if name in NO_ROOM:
                continue
            for function, node in sorted(_targets(ast.parse(file.read_text())), key=lambda target: _place(target[1])):
                callee, is_statement = _callee(node), isinstance(node, ast.Expr)
                same = found.setdefault((function, callee), [])
                mutant = Mutant(name, *_place(node), function, ast.unparse(node), callee, is_statement, len(same))
                same.append(mutant)
    return tuple(mutant for same in found.values() for mutant in same)


def _callee(node: ast.AST) -> str:
    """What is called, without arguments, also of calls inside of it."""
    call = copy.deepcopy(node.value if isinstance(node, ast.Expr) else node)
    for each in ast.walk(call):
        if isinstance(each, ast.Call):
            each.args, each.keywords = [], []
    return ast.unparse(call.func)


def _targets(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The nodes to delete, each with the name of the outermost function around it."""
    for outer in tree.body:
        members = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for function in members:
            if isinstance(function, ast.FunctionDef):
                name = function.name if function is outer else f"{outer.name}.{function.name}"
                found = [node for node in ast.walk(function) if _orders(node)]
                within = [each for node in found if _is_pending(node) for each in node.args]
                hidden = {id(each) for node in within for each in ast.walk(node)}  # it goes with its `Pending`
                yield from ((name, node) for node in found if id(node) not in hidden)


def _orders(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        is_named = isinstance(call.func, ast.Attribute) and call.func.attr in ORDERING
        return is_named and ast.unparse(call.func) not in NOT_ORDERING
    return _is_pending(node) or _is_handed_on(node)


def _is_pending(node: ast.AST) -> bool:
    is_pending = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pending"
    return is_pending and bool(node.args)


def _is_handed_on(node: ast.AST) -> bool:
    """Whether a call is given a function that would wait."""
    return isinstance(node, ast.Call) and any(map(_waits, node.args))


def _waits(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ORDERING and not isinstance(node.value, ast.Constant)


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


class _Change(ast.NodeTransformer):
    """Changes some of a module's places.

    Args:
        chosen (`Iterable[Mutant]`): which.
        of_call (`Callable`): gives what stands for a call.
        of_wait (`Callable`): gives what stands for the value of a statement that waits.
    """

    def __init__(self, chosen: Iterable[Mutant], of_call: Callable, of_wait: Callable):
        self._chosen = {(each.is_statement, each.line, each.column, each.source): each for each in chosen}
        self._of_call, self._of_wait = of_call, of_wait

    def visit(self, node: ast.AST) -> ast.AST:
        key = None
        if isinstance(node, (ast.Expr, ast.Call)):
            key = isinstance(node, ast.Expr), *_place(node), ast.unparse(node)
        node = self.generic_visit(node)
        mutant = self._chosen.get(key)
        if mutant is None:
            return node
        if isinstance(node, ast.Call):
            return self._of_call(node, mutant)
        node.value = self._of_wait(node.value, mutant)
        return node


def _without_wait(call: ast.Call, _: Mutant) -> ast.expr:
    """What is waited for still happens."""
    left = [call.func.value, *call.args, *(keyword.value for keyword in call.keywords)]
    return ast.Tuple(left, ast.Load())


def _without_function(call: ast.Call, _: Mutant) -> ast.expr:
    call.args = [] if _is_pending(call) else [_NOTHING if _waits(each) else each for each in call.args]
    return call


_NOTHING = ast.parse("lambda *_, **__: None", mode="eval").body


def _noted(node: ast.expr, mutant: Mutant) -> ast.expr:
    note = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(str(mutant))], [])
    return ast.Subscript(ast.Tuple([note, node], ast.Load()), ast.Constant(1), ast.Load())


_NOTE = "_note_that_it_is_reached"


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Runs the package without that line, in this process."""
    with _changed([mutant], _Change([mutant], _without_function, _without_wait)):
        yield


@contextmanager
def reached(wanted: Iterable[Mutant]) -> Iterator[set[str]]:
    """Yields a set, to which each mutant is added, as text, whose place is reached inside the context."""
    found: set[str] = set()
    with ExitStack() as stack:
        by_file: dict[str, list[Mutant]] = {}
        for mutant in wanted:
            by_file.setdefault(mutant.file, []).append(mutant)
        for chosen in by_file.values():
            vars(_module_of(chosen[0]))[_NOTE] = found.add
            stack.enter_context(_changed(chosen, _Change(chosen, _noted, _noted)))
        yield found


@contextmanager
def _changed(chosen: list[Mutant], change: _Change) -> Iterator[None]:
    """Runs the functions of some mutants, all of one file, as they are after a change."""
    module = _module_of(chosen[0])
    tree = ast.fix_missing_locations(change.visit(ast.parse(Path(module.__file__).read_text())))
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(tree, module.__file__, "exec"), namespace)
    originals = {}
    for name in {mutant.function for mutant in chosen}:
        function = _function_of(vars(module), name)
        originals[function] = function.__code__
        function.__code__ = _function_of(namespace, name).__code__
    try:
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


@cache
def _module_of(mutant: Mutant) -> ModuleType:
    return importlib.import_module("hf_zero." + mutant.file.removesuffix(".py").replace("/", "."))


def _function_of(namespace: dict, name: str) -> FunctionType:
    owner, _, attribute = name.rpartition(".")
    found = inspect.getattr_static(namespace[owner], attribute) if owner else namespace[name]
    found = getattr(found, "__func__", getattr(found, "fget", found))
    return inspect.unwrap(found)
