"""Imports go downward only: the floors of docs/design.md, read off the source."""

import ast
from pathlib import Path

import pytest


pytestmark = pytest.mark.quick


PACKAGE = Path(__file__).parents[1] / "hf_zero"

FLOORS = {
    "errors": 0,
    "config": 0,
    "compat": 0,
    "lazy_names": 0,
    "parent": 0,
    "removed": 0,
    "comm": 1,
    "sharding": 2,
    "storage": 2,
    "engine": 3,
    "optim": 4,
    "checkpoint": 4,
    "activation": 4,
    "planner": 5,
    "accelerator": 5,
    "lightning": 5,
    "trainer": 6,
    "trl": 7,
    "recipes": 8,
}
# Rooms of one floor do not know one another, but for what floor 0 says in its own errors.
NEIGHBOURS = {("config", "errors"), ("config", "removed"), ("compat", "errors"), ("removed", "errors")}
MAY_IMPORT_TRANSFORMERS = {"trainer", "trl", "recipes", "checkpoint"}
MAY_IMPORT_TRAINER = {"trainer", "trl", "recipes"}


def room_of(module: str) -> str:
    """`"optim"` of `"hf_zero.optim.gradients"`; the package itself is above all rooms."""
    return module.split(".")[1] if "." in module else ""


def imports_of(module: str, source: str, is_package: bool = False) -> list[tuple[int, str]]:
    """Every module that a source imports, at whatever depth of it, as (line, full name), relative names resolved."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base]) if base else ".".join(kept)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            found += [(node.lineno, str(name)) for name in names]
    return found


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module of the package imports although it must not."""
    room, found = room_of(module), []
    if not room:
        return found
    for line, name in imports_of(module, source, is_package):
        where = f"{module}:{line}: imports {name}"
        if name.split(".")[0] == "transformers":
            if room not in MAY_IMPORT_TRANSFORMERS:
                found.append(f"{where}; {room} takes any nn.Module")
            elif "trainer" in name.lower() and room not in MAY_IMPORT_TRAINER:
                found.append(f"{where}; only trainer and recipes know transformers' Trainer")
        if name.split(".")[0] != "hf_zero":
            continue
        other = room_of(name)
        if other not in FLOORS:
            found.append(f"{where}; inside the package, import from the room that has it")
        elif FLOORS[other] > FLOORS[room]:
            found.append(f"{where}; floor {FLOORS[room]} does not know floor {FLOORS[other]}")
        elif other != room and FLOORS[other] == FLOORS[room] and (room, other) not in NEIGHBOURS:
            found.append(f"{where}; rooms of one floor do not know one another")
    return found


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name, _ in modules()} - {""}
    assert rooms <= FLOORS.keys(), f"no floor: {sorted(rooms - FLOORS.keys())}"
    assert {"errors", "config", "comm", "sharding", "engine", "optim"} <= rooms


def test_imports_go_downward_only():
    found = [
        text
        for module, path in modules()
        for text in complaints(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)
