"""docs/coming-from.md: keys of hf_zero in its tables exist; every key of TRL is the same here or in the table."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hf_zero.recipes.run_config import make_parser
from hf_zero.recipes.tasks import TASKS, TOOLS
from tests.generated import part


pytest.importorskip("trl")

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLES = ["trl", "axolotl", "llama-factory"]
# TRL's script of a task; `pretrain` and `classify` have none.
SCRIPTS = {name: name for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo")} | {"distill": "distillation"}
# Read by TRL's command line itself, before the script.
OF_THE_COMMAND = {"accelerate_config", "env"}


def rows(name: str) -> list[tuple[str, str, str]]:
    """The rows of a table: their key, our key, and the remark."""
    lines = part(PAGE, name).splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def our_keys() -> dict[str, set[str]]:
    return {task: {action.dest for action in make_parser(task)._actions} for task in TASKS}


def keys_of_trl() -> dict[str, set[str]]:
    """What the script of each task takes."""
    import importlib

    found = {}
    for task, script in SCRIPTS.items():
        parser = importlib.import_module(f"trl.scripts.{script}").make_parser()
        found[task] = {each.name for kind in parser.dataclass_types for each in fields(kind) if each.init}
    return found


@pytest.mark.parametrize("page", TABLES)
def test_every_key_of_ours_in_a_table_is_one_of_a_task(page):
    known = set().union(*our_keys().values())
    found = [name for theirs, ours, remark in rows(page) for name in re.findall(r"--(\w+)", ours + remark)]
    assert len(found) > 5 and [name for name in found if name not in known] == []


@pytest.mark.parametrize("page", TABLES)
def test_a_row_says_which_key_it_is_or_that_there_is_none(page):
    found = rows(page)
    theirs = [name for row in found for name in re.findall(r"`([\w.]+)`", row[0])]
    assert len(theirs) == len(set(theirs))
    assert [row for row in found if len(row) != 3 or not (row[1].startswith("`--") or row[1] in SAID)] == []


SAID = ("none", "nothing to set")


def test_every_key_of_trl_is_here_under_its_name_or_in_the_table():
    ours, named = our_keys(), {row[0].strip("`"): row[1] for row in rows("trl")}
    theirs = keys_of_trl()
    assert named.keys() - OF_THE_COMMAND <= set().union(*theirs.values()), "TRL has no such key"
    for task, keys in theirs.items():
        missing = keys - ours[task]
        assert missing <= named.keys(), (
            f"{task} has no key {missing - named.keys()}, and docs/coming-from.md does not list it"
        )


def test_the_commands_of_the_page_exist():
    assert {name for name in re.findall(r"`hf-zero (\w+)", TEXT)} <= {*TASKS, *TOOLS}


def test_the_changed_import_has_trls_names():
    import trl

    import hf_zero.trl

    lines = re.findall(r"^([+-])from (\S+) import (.+)$", TEXT, re.MULTILINE)
    (_, _, before), (_, module, after) = [line for line in lines if "trl" in line[1]]
    assert module == "hf_zero.trl"
    pairs = [words.split(" as ") for words in after.split(", ")]
    assert [new for _, new in pairs] == before.split(", ")
    assert all(issubclass(getattr(hf_zero.trl, name), getattr(trl, new)) for name, new in pairs)
