"""The glossary of docs/design.md names classes, functions and folders that exist."""

import ast
import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "hf_zero").rglob("*.py")}


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
