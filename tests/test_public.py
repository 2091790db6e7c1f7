"""What can be had from `hf_zero` and its packages: by name, in any order, with no torch before it is asked for."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_zero
import hf_zero.trainer
import hf_zero.trl
from hf_zero.errors import ConfigError


PACKAGES = {"hf_zero": hf_zero, "hf_zero.trainer": hf_zero.trainer, "hf_zero.trl": hf_zero.trl}


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not result.returncode, result.stderr
    return result.stdout


def names_for_type_checkers(path: str) -> dict[str, str]:
    """The names that a package imports for type checkers only, and whence."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    found = [(alias, line.module) for line in blocks[0].body for alias in line.names]
    assert all(alias.asname == alias.name for alias, _ in found), "`X as X` lets type checkers see a name from outside"
    return {alias.name: module for alias, module in found}


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_each_name_where_it_is_found(package):
    module = PACKAGES[package]
    wanted = {name: f"{package}.{where}" for where, names in module._NAMES.items() for name in names}
    found = names_for_type_checkers(module.__file__)
    rooms = {name for name, where in found.items() if where == package}
    assert {name: where for name, where in found.items() if name not in rooms} == wanted
    assert rooms <= set(getattr(module, "_ROOMS", ()))
    assert set(module.__all__) == set(wanted) <= set(dir(module))


@pytest.mark.quick
def test_each_name_is_found():
    for name in hf_zero.__all__:
        assert getattr(hf_zero, name).__name__ == name
    missing = {"lightning"} if find_spec("lightning") is None else set()  # which needs its library
    for room in set(hf_zero._ROOMS) - missing:
        assert getattr(hf_zero, room).__name__ == f"hf_zero.{room}"
    with pytest.raises(AttributeError, match="module 'hf_zero' has no attribute 'shart'"):
        hf_zero.shart  # noqa: B018


@pytest.mark.quick
def test_import_brings_neither_torch_nor_transformers():
    code = """
import sys, hf_zero
assert "ZeroTrainer" in dir(hf_zero), dir(hf_zero)
heavy = {"torch", "transformers", "accelerate", "numpy", "trl"} & sys.modules.keys()
assert not heavy, heavy
import hf_zero.trl
assert not {"torch", "trl"} & sys.modules.keys()
"""
    run(code)


def test_star_brings_the_public_names():
    exec("from hf_zero import *", names := {})
    assert names.keys() - {"__builtins__"} == set(hf_zero.__all__)
    assert all(names[name] is getattr(hf_zero, name) for name in hf_zero.__all__)


def test_no_public_name_is_a_module_too():
    folder = Path(hf_zero.__file__).parent
    modules = {path.stem for path in folder.iterdir()}
    assert not modules & set(hf_zero.__all__), "importing the module would put it where the name is"


def test_what_is_no_model_or_no_setting_is_refused_in_one_line():
    import torch

    with pytest.raises(ConfigError, match=r"shard: '\[1\]' is of type list; expected a torch.nn.Module"):
        hf_zero.shard([1])
    with pytest.raises(ConfigError, match="shard: 'stag' is not one of stage, .*; the nearest is 'stage'"):
        hf_zero.shard(torch.nn.Linear(2, 2), stag=3)
    for make in (hf_zero.ShardedModel, lambda model: hf_zero.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)):
        with pytest.raises(ConfigError, match="is of type list; pass a sharded model"):
            make([1])
    for what in ([1], None):
        with pytest.raises(ConfigError, match="gathered: .*; give a module, or parameters"), hf_zero.gathered(what):
            pass
