"""What the package says of itself: what it needs, who may use it, what runs it elsewhere. `make wheel` installs it."""

import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_zero
from tests.test_floors import imports_of, modules


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Imported by those who have asked for them, where they are used; each is in an extra.
OPTIONAL = {"bitsandbytes", "lightning", "peft", "pillow", "trl"}


@cache
def imported() -> set[str]:
    """The distributions that modules of hf_zero import, at whatever depth of them."""
    found, distributions = set(), metadata.packages_distributions()
    for module, path in modules():
        source = path.read_text(encoding="utf-8")
        for _, name in imports_of(module, source, path.name == "__init__.py"):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "hf_zero":
                found |= {canonicalize_name(name) for name in distributions.get(top, (top,))}
    return found


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    assert names(PROJECT["dependencies"]) == imported() - OPTIONAL


def test_what_is_optional_is_in_an_extra():
    extras = set().union(*map(names, PROJECT["optional-dependencies"].values()))
    assert imported() & OPTIONAL <= extras


def test_one_line_of_the_constraints_for_each_dependency():
    pins = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    assert names(PROJECT["dependencies"]) <= pins


def test_the_licence_is_the_one_that_is_named():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == hf_zero.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def _made_by(line: str) -> list[str]:
    """The targets that a line of `make` names, beside its options and their numbers."""
    command, *words = line.split()
    assert command == "make", line
    return [word for word in words if not word.startswith("-") and not word.isdigit()]


def test_workflows_run_targets_of_make_and_nothing_else():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for job in jobs:
            found += [name for step in job["steps"] if "run" in step for name in _made_by(step["run"])]
    assert found and set(found) <= set(targets)
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    own = [name for line in lines if line.startswith("make ") for name in _made_by(line)]
    assert own
    assert set(own) <= set(found), "what CI of the project runs, the public one runs too"
