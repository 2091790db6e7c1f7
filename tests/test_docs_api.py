"""The pages of docs/api name every public name, and Sphinx reads the docstrings as they are meant."""

import importlib.util
import re
from pathlib import Path

import pytest

import hf_zero
import hf_zero.trl


DOCS = Path(__file__).parents[1] / "docs"
DIRECTIVE = re.compile(r"^\.\. (py:currentmodule|autoclass|autofunction):: ([\w.]+)", re.MULTILINE)
pytestmark = pytest.mark.quick


def documented(package: str) -> list[str]:
    """The names of a package that stand in a directive of autodoc, in all pages."""
    found = []
    for page in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for kind, name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if kind == "py:currentmodule":
                module = name
            elif "." not in name and module == package:
                found.append(name)
    return found


@pytest.mark.parametrize("package", [hf_zero, hf_zero.trl], ids=lambda package: package.__name__)
def test_each_public_name_stands_on_one_page(package):
    assert sorted(documented(package.__name__)) == sorted(package.__all__)


def test_each_page_is_in_the_table_of_contents():
    listed = re.findall(r"^api/([\w-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in (DOCS / "api").glob("*.md"))


def _docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["A `name`, and ``one`` that is code already."], ["A ``name``, and ``one`` that is code already."]),
        (["engine ([`Engine`]): the model."], ["engine (``Engine``): the model."]),
        (["Args:", "    a (`int`): one."], ["Args:", "    a (``int``): one."]),
        (["Write:", "", "    shard(model)"], ["Write::", "", "    shard(model)"]),
        (["[Note: order]", "First."], ["**order**", "", "First."]),
    ],
)
def test_a_docstring_becomes_restructured_text(written, read):
    assert _docstrings().to_rst(written) == read
