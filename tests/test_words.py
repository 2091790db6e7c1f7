"""One meaning for each word: the glossary of docs/design.md names what there is, and no class name stands twice."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest


pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "hf_zero").rglob("*.py")}
SHARED = {"Arguments"}  # each task's dataclass of flags has this name
# What a task, a tool, a reader of foreign files and a module of hooks consist of has one name in each of them.
PARTS = {"run", "check", "load_data", "load_model", "load_tokenizer", "make_trainer", "before", "after"}
PARTS |= {"read_state", "read_weights", "install"}


def test_the_glossary_names_what_there_is():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    glossary = page.partition("## Glossary")[2].partition("\n## ")[0]
    ours = [line.rpartition("|")[0].rpartition("|")[0] for line in glossary.splitlines()]  # the last column is theirs
    words = re.findall(r"`([\w./]+)(?:\(\))?`", "\n".join(ours))
    known = {node.name for tree in TREES.values() for node in ast.walk(tree) if hasattr(node, "name")} | {"engine"}
    for word in words:
        found = (ROOT / "hf_zero" / word).exists() if "/" in word else set(word.split(".")) <= known
        assert found, f"docs/design.md: its glossary has {word}, hf_zero has not"
    assert len(words) > 12


def test_no_class_name_stands_for_two_things():
    found = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SHARED}
    assert not twice, f"give each a name of its own: {twice}"


def test_no_public_function_has_a_name_twice():
    found = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in PARTS:
                found[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice, f"give each a name of its own: {twice}"


def test_no_module_has_a_name_twice():
    names = [path.name for path in TREES if not path.name.startswith("__")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"give each a name of its own: {twice}"
