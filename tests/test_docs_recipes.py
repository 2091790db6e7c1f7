"""The tables of docs/recipes.md, and that of recipe keys in docs/flags.md, match the code."""

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from hf_zero.recipes.data.formats import FORMATS, LABELS, MASKS, TOKENIZED, TOKENS, text_format
from hf_zero.recipes.data.mixture import Stopping
from hf_zero.recipes.output_dir import RESOLVED_NAME, RUN_NAME
from hf_zero.recipes.report import CHARTS_FOLDER, REPORT_NAME
from hf_zero.recipes.run_config import LaunchArguments
from hf_zero.recipes.tasks import TASKS, TOOLS, SourceArguments
from hf_zero.recipes.telemetry import LOG_NAME
from tests.generated import check_part


ROOT = Path(__file__).parents[1]
PAGE, FLAGS = ROOT / "docs" / "recipes.md", ROOT / "docs" / "flags.md"
COUNTED = {"assistant": "assistant turns", "completion": "the completion", None: "all tokens"}


def tasks() -> str:
    return "\n".join(["| task | |", "|---|---|", *(f"| `{name}` | {task.summary} |" for name, task in TASKS.items())])


def formats() -> str:
    lines = ["| format | columns | the loss counts |", "|---|---|---|"]
    for form in (text_format("text"), *FORMATS):
        columns = ", ".join(f"`{column}`" for column in form.columns)
        lines.append(f"| `{form.name}` | {columns} | {COUNTED[form.counts]} |")
    masks = " and ".join(f"`{name}`" for name in MASKS)
    counted = f"tokens selected by `{LABELS}`, or by {masks}; without them all tokens"
    lines.append(f"| `{TOKENIZED}` | `{TOKENS}` | {counted} |")
    return "\n".join(lines)


def arguments() -> str:
    shared = [field for kind in (LaunchArguments, SourceArguments) for field in fields(kind)]
    owners, known, defaults = {}, {_told(field): field for field in shared}, {}
    for task, entry in TASKS.items():
        for kind in (LaunchArguments, entry.load().Arguments):
            for field in fields(kind):
                owners.setdefault(_told(field), []).append(task)
        for field in fields(entry.load().Arguments):
            known.setdefault(_told(field), field)
            defaults.setdefault(_told(field), {})[task] = field.default
    keys: dict[str, list[str]] = {}
    for told, field in known.items():
        default = _default(field.default, defaults.get(told, {}))
        missing = [task for task in TASKS if task not in owners[told]]
        of = {(): "all", ("classify",): "all but classify"}.get(tuple(missing), ", ".join(owners[told]))
        keys.setdefault(of, []).append(f"`{field.name}`{default and f' ({default})'}")
    return "\n".join(f"- **{of}**: {', '.join(names)}" for of, names in keys.items())


def _told(field: Field) -> tuple[str, str]:
    """Tasks may tell different things of a key."""
    return field.name, field.metadata["help"]


def _default(value: Any, of_tasks: dict[str, Any]) -> str:
    """The default, and those of tasks that have another."""
    shown = [] if value is None or value is False else [f"{value}"]
    shown += [f"{task}: {own}" for task, own in of_tasks.items() if own != value]
    return ", ".join(shown)


@pytest.mark.quick
@pytest.mark.parametrize("table", [tasks, formats, arguments], ids=lambda table: table.__name__)
def test_a_table_is_the_one_of_the_code(table, request):
    page = FLAGS if table is arguments else PAGE
    check_part(page, table.__name__, table(), request.config.getoption("--write-docs"))


def test_what_a_run_leaves_is_named():
    text = PAGE.read_text(encoding="utf-8")
    for name in (RESOLVED_NAME, RUN_NAME, REPORT_NAME, CHARTS_FOLDER, LOG_NAME):
        assert f"| `{name}` |" in text


def test_the_function_of_the_page_judges_answers(tmp_path):
    pytest.importorskip("trl")
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "rewards.py").write_text(code, encoding="utf-8")
    (judge,) = rewards_of(RewardedArguments(reward_funcs=[f"{tmp_path}/rewards.py:short"]))
    assert judge(prompts=["a", "b"], completions=["four", ""], colour=["red", "blue"]) == [-4.0, 0.0]


def test_every_tool_stands_in_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in TOOLS if f"\nhf-zero {name}" not in text] == []


def test_every_key_that_the_page_names_is_one_of_some_task_or_tool():
    from hf_zero.recipes.cli import make_tool_parser
    from hf_zero.recipes.run_config import make_parser

    parsers = [*map(make_parser, TASKS), *map(make_tool_parser, TOOLS)]
    known = {action.dest for parser in parsers for action in parser._actions}
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"--([a-z_0-9]+)", text)) | set(re.findall(r"`([a-z]+_[a-z_]+)`", text))
    assert named - known - {"from_pretrained", "nproc_per_node", TOKENS, *MASKS, *get_args(Stopping)} == set()
