"""The front page says what the README says; the pages of docs/api have every public name."""

import importlib.util
import re
from pathlib import Path

import pytest

import hf_zero
import hf_zero.trl
from tests.test_readme import FRONT, README


DOCS = Path(__file__).parents[1] / "docs"
DIRECTIVE = re.compile(r"^\.\. (py:currentmodule|py:class|autoclass|autofunction):: ([\w.]+)", re.MULTILINE)
pytestmark = pytest.mark.quick


def documented(package: str) -> list[str]:
    """The names of a package that stand in a directive, in all pages."""
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


def _module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
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
    assert _module(DOCS / "docstrings.py").to_rst(written) == read


# The front page


def test_the_figures_are_those_of_the_readme():
    peak, of_ddp, time = re.search(r"\*\*(\d+) MiB instead of (\d+), in ([\d.]+) of the time", FRONT).groups()
    assert re.search(rf"^\| hf_zero stage 3 \| \**{time}\** \| \**{peak}\** \|", README, re.MULTILINE)
    assert re.search(rf"^\| DDP [^|]*\| 1 \| {of_ddp} \|", README, re.MULTILINE)


def test_the_picture_is_the_one_that_its_source_draws():
    stages = _module(DOCS / "figures" / "stages.py")
    assert (DOCS / "figures" / "stages.svg").read_text(encoding="utf-8") == stages.draw()
    totals = [sum(stages.held(stage).values()) for stage in range(4)]
    assert [f"{total:g} at stage {stage}" in FRONT for stage, total in enumerate(totals)] == [True] * 4


@pytest.mark.parametrize("stage", range(4))
def test_the_picture_shows_the_bytes_of_the_readme(stage):
    (written,) = re.findall(rf"^\| {stage} \| [^|]+ \| ([^|]+) \| \d", README, re.MULTILINE)
    stages = _module(DOCS / "figures" / "stages.py")
    wanted = sum(_value(term, stages.NUM_RANKS) for term in written.split(" + "))
    assert sum(stages.held(stage).values()) == wanted


def _value(term: str, num_ranks: int) -> float:
    """Of a term such as `2` or `12/N`."""
    size, _, divisor = term.partition("/")
    return float(size) / (num_ranks if divisor == "N" else 1)
