"""What README.md and the pages of docs/ say of the code: generated tables, names, messages, keys and command lines."""

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import hf_zero
import hf_zero.trl
from benchmarks import try_gpu
from benchmarks.gpu import parse_arguments
from hf_zero.recipes.cli import make_tool_parser
from hf_zero.recipes.data.formats import FORMATS, LABELS, MASKS, TOKENIZED, TOKENS, text_format
from hf_zero.recipes.data.sources import Stopping
from hf_zero.recipes.plan_input import example_batch
from hf_zero.recipes.run_config import LaunchArguments, RunConfig, make_parser
from hf_zero.recipes.tasks import TASKS, TOOLS, SourceArguments
from tests.docs import DOCS, ROOT, fenced_blocks, part, text_of, write_part
from tests.planner.subjects import predict
from tests.public_models import empty_model
from tests.test_docs_examples import ACTIVATE
from tests.tiers import in_core
from tests.trials.__main__ import make_parser as make_trials_parser


README, FRONT, GIB = text_of("README.md"), text_of("index.md"), 2**30


# docs/memory.md

COLUMNS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "3, optimizer on the host": {"stage": 3, "offload": "optimizer"},
    "3, parameters too": {"stage": 3, "offload": "params"},
}
TABLED = ["HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"]
TABLED += ["meta-llama/Llama-3.1-70B"]


def resting(model: str) -> str:
    """One row of the table."""
    cells = []
    for settings in COLUMNS.values():
        told = predict(empty_model(model), num_ranks=8, compute_dtype=torch.bfloat16, **settings)
        host = f" ({told.host_nbytes / GIB:.1f})" if told.host_nbytes else ""
        cells.append(f"{told.resting_nbytes / GIB:.1f}{host}")
    return f"| {model} | {' | '.join(cells)} |"


def test_the_table_of_stages_has_a_row_for_each_model(writes_docs):
    header = f"| | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}"
    if writes_docs:
        write_part(DOCS / "memory.md", "resting", "\n".join([header, *map(resting, TABLED)]))
    lines = part(DOCS / "memory.md", "resting").splitlines()
    assert "\n".join(lines[:2]) == header
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == TABLED


@pytest.mark.parametrize("model", in_core(TABLED[:1], TABLED))
def test_the_table_of_stages_says_what_is_predicted(model):
    assert resting(model) in part(DOCS / "memory.md", "resting").splitlines(), "run this file with --write-docs"


# What is set, one behind the other, and what that is for the planner.
ADDED = {
    "`--zero_stage 0`": {"stage": 0, "rows": 2},
    "`--zero_stage 3`": {"stage": 3},
    "`--gradient_checkpointing`": {"gradient_checkpointing": True},
    "`--bf16`": {"compute_dtype": torch.bfloat16},
    "`--per_device_train_batch_size 1`": {"rows": 1},
    "`--zero_chunked_loss auto`, the default of trainers": {"chunked_loss": "auto"},
    "`--zero_offload optimizer`": {"offload": "optimizer"},
    "`--zero_offload_activations`": {"offload_activations": True},
    "`--zero_offload params`": {"offload": "params"},
}


@pytest.mark.full("slow")
def test_each_line_of_what_to_set_takes_off_what_the_table_says(check_part):
    settings, model, lines, devices = {}, empty_model("meta-llama/Llama-3.1-8B"), [], []
    for name, more in ADDED.items():
        settings |= more
        given = {key: value for key, value in settings.items() if key != "rows"}
        told = predict(model, num_ranks=8, batch=example_batch(model, settings["rows"], 4096), **given)
        devices.append(told.peak_nbytes / GIB)
        lines.append(f"| {name} | {devices[-1]:.1f} | {told.host_nbytes / GIB:.1f} |")
    check_part(DOCS / "memory.md", "peaks", "\n".join(["| set | GPU | host |", "|---|--:|--:|", *lines]))
    assert devices == sorted(devices, reverse=True)


# docs/flags.md and docs/recipes.md


def flags() -> str:
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in fields(hf_zero.ZeroTrainingArguments):
        if field.name.startswith("zero_"):
            help_text = re.sub(r"--\w+", lambda flag: f"`{flag[0]}`", field.metadata["help"])
            lines.append(f"| `--{field.name}` | {field.default} | {help_text} |")
    return "\n".join(lines)


def tasks() -> str:
    return "\n".join(["| task | |", "|---|---|", *(f"| `{name}` | {task.summary} |" for name, task in TASKS.items())])


def formats() -> str:
    lines = ["| format | columns | tokens in the loss |", "|---|---|---|"]
    counted = {"assistant": "assistant turns", "completion": "the completion", None: "all tokens"}
    for form in (text_format("text"), *FORMATS):
        columns = ", ".join(f"`{column}`" for column in form.columns)
        lines.append(f"| `{form.name}` | {columns} | {counted[form.counts]} |")
    masks = " and ".join(f"`{name}`" for name in MASKS)
    tokens = f"tokens selected by `{LABELS}`, or by {masks}; without them all tokens"
    lines.append(f"| `{TOKENIZED}` | `{TOKENS}` | {tokens} |")
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
@pytest.mark.parametrize(
    "page, table", [("flags", flags), ("flags", arguments), ("recipes", tasks), ("recipes", formats)]
)
def test_a_table_is_the_one_of_the_code(page, table, check_part):
    check_part(DOCS / f"{page}.md", table.__name__, table())


def test_the_flags_of_trainer_have_the_defaults_of_the_table():
    text = text_of("flags.md").partition("<!-- end flags -->")[2]
    table = dict(re.findall(r"^\| `--(\w+)` \| (\S+) \|", text, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(hf_zero.ZeroTrainingArguments)}
    assert len(table) > 3 and table == {name: str(defaults[name]) for name in table}


def test_every_key_that_the_page_names_is_one_of_some_task_or_tool():
    parsers = [*map(make_parser, TASKS), *map(make_tool_parser, TOOLS)]
    known = {action.dest for parser in parsers for action in parser._actions}
    text = text_of("recipes.md")
    named = set(re.findall(r"--([a-z_0-9]+)", text)) | set(re.findall(r"`([a-z]+_[a-z_]+)`", text))
    assert named - known - {"from_pretrained", "nproc_per_node", TOKENS, *MASKS, *get_args(Stopping)} == set()


# docs/coming-from.md

TABLES = ["trl", "axolotl", "llama-factory"]
# TRL's script of a task; `pretrain` and `classify` have none.
SCRIPTS = {name: name for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo")} | {"distill": "distillation"}
# Read by TRL's command line itself, before the script.
OF_THE_COMMAND = {"accelerate_config", "env"}


def rows(name: str) -> list[tuple[str, str, str]]:
    """The rows of a table: their key, our key, and the remark."""
    lines = part(DOCS / "coming-from.md", name).splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


@pytest.mark.parametrize("table", TABLES)
def test_a_row_says_which_key_of_ours_it_is_or_that_there_is_none(table):
    found = rows(table)
    theirs = [name for row in found for name in re.findall(r"`([\w.]+)`", row[0])]
    assert len(theirs) == len(set(theirs))
    unclear = [row for row in found if not (row[1].startswith("`--") or row[1] in ("none", "nothing to set"))]
    assert not unclear and {len(row) for row in found} == {3}
    known = {action.dest for task in TASKS for action in make_parser(task)._actions}
    named = [name for _, ours, remark in found for name in re.findall(r"--(\w+)", ours + remark)]
    assert len(named) > 5 and [name for name in named if name not in known] == []


def test_every_key_of_trl_is_here_under_its_name_or_in_the_table():
    pytest.importorskip("trl")
    named, theirs = {row[0].strip("`") for row in rows("trl")}, set()
    for task, script in SCRIPTS.items():
        parser = importlib.import_module(f"trl.scripts.{script}").make_parser()
        keys = {each.name for kind in parser.dataclass_types for each in fields(kind) if each.init}
        missing = keys - {action.dest for action in make_parser(task)._actions} - named
        assert not missing, f"{task} has no key {missing}, and docs/coming-from.md does not list it"
        theirs |= keys
    assert named - OF_THE_COMMAND <= theirs, "TRL has no such key"


def test_the_changed_import_has_trls_names():
    trl = pytest.importorskip("trl")
    lines = re.findall(r"^([+-])from (\S+) import (.+)$", text_of("coming-from.md"), re.MULTILINE)
    (_, _, before), (_, module, after) = [line for line in lines if "trl" in line[1]]
    assert module == "hf_zero.trl"
    pairs = [words.split(" as ") for words in after.split(", ")]
    assert [new for _, new in pairs] == before.split(", ")
    assert all(issubclass(getattr(hf_zero.trl, name), getattr(trl, new)) for name, new in pairs)


# docs/errors.md


@cache
def messages() -> str:
    """All texts of the package, one a line, with `...` for what is filled in."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "hf_zero").rglob("*.py"))
    found = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


@pytest.mark.quick
def test_the_messages_of_the_page_of_errors_are_those_of_the_package():
    quoted = [heading.strip("`") for heading in re.findall(r"^### (.+)$", text_of("errors.md"), re.MULTILINE)]
    assert len(quoted) == len(set(quoted)) >= 25
    # without dots at the ends: a pattern that begins with .* is tried at each letter of a line
    patterns = {message: ".*".join(map(re.escape, message.strip(".").split("..."))) for message in quoted}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, messages())] == []


# Command lines and links


def command_lines() -> dict[str, list[str]]:
    """The commands of each page: lines of bash blocks, and commands between backticks."""
    found = {}
    for path in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        scripts = [block.text.replace("\\\n", " ") for block in fenced_blocks(text) if block.language == "bash"]
        lines = [line for script in scripts for line in script.splitlines()]
        lines += re.findall(r"`((?:hf-zero|python -m hf_zero\.recipes|torchrun) [^`\n]+)`", text)
        if lines := [line for line in dict.fromkeys(lines) if line.strip() and not line.startswith("#")]:
            found[str(path.relative_to(ROOT))] = lines
    return found


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("page", command_lines())
def test_the_commands_of_a_page_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in command_lines()[page]:
        try:
            check_command(shlex.split(line))
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}: {line}: {error}") from error


def check_command(words: list[str]) -> None:
    """Parses a command as the program that it starts would.

    Raises:
        AssertionError: for a program that the pages should not have.
    """
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    modules = {
        "hf_zero.recipes": _check_recipe,
        "benchmarks.gpu": parse_arguments,
        "benchmarks.try_gpu": try_gpu.parse_arguments,
        "tests.trials": lambda words: make_trials_parser().parse_args(words),
    }
    program, *arguments = words
    if program == "hf-zero":
        _check_recipe(arguments)
    elif words[:2] == ["python", "-m"]:
        modules[words[2]](words[3:])
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.training_script == ("hf_zero.recipes" if parsed.module else "train.py")
        if parsed.module:
            _check_recipe(parsed.training_script_args)
    elif words[:2] == ["accelerate", "launch"]:
        parsed = launch_command_parser().parse_args(words[2:])
        assert parsed.module and parsed.training_script == "hf_zero.recipes"
        assert parsed.num_processes % parsed.num_machines == 0 and parsed.machine_rank < parsed.num_machines
        _check_recipe(parsed.training_script_args)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", text_of("Makefile"), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        extras = re.search(r"\[(.*)\]", arguments[-1])
        project = tomllib.loads(text_of("pyproject.toml"))["project"]
        assert set(extras[1].split(",") if extras else []) <= project["optional-dependencies"].keys()
    elif program == "source":
        assert words == shlex.split(ACTIVATE)
    else:
        assert program == "export", f"{shlex.join(words)}: no test knows this command"


def _check_recipe(words: list[str]) -> None:
    from hf_zero.recipes.plan import read_run

    if len(words) == 1 or words[1] == "--help":  # the name of a task, a tool or a key in a sentence
        assert words[0] in (*TASKS, *TOOLS, "--num_processes")
    elif words[:2] == ["plan", "--config"]:
        read_run(words[1:])
    elif words[0] in TASKS:
        RunConfig.parse(words[0], words[1:])
    else:
        assert words[0] in TOOLS and make_tool_parser(words[0]).parse_known_args(words[1:])[1] == []


@pytest.mark.quick
@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_links_to_files_lead_somewhere(page):
    """Sphinx checks those between the pages of docs/."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


# docs/api and the front page


@pytest.mark.quick
@pytest.mark.parametrize("package", [hf_zero, hf_zero.trl], ids=lambda package: package.__name__)
def test_each_public_name_stands_on_one_page(package):
    directive = re.compile(r"^\.\. (py:currentmodule|py:class|autoclass|autofunction):: ([\w.]+)", re.MULTILINE)
    found = []
    for page in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for kind, name in directive.findall(page.read_text(encoding="utf-8")):
            if kind == "py:currentmodule":
                module = name
            elif "." not in name and module == package.__name__:
                found.append(name)
    assert sorted(found) == sorted(package.__all__)


def _module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.quick
def test_the_picture_of_stages_is_drawn_from_the_bytes_of_the_readme():
    stages = _module(DOCS / "figures" / "stages.py")
    assert (DOCS / "figures" / "stages.svg").read_text(encoding="utf-8") == stages.draw()
    for stage in range(4):
        (written,) = re.findall(rf"^\| {stage} \| [^|]+ \| ([^|]+) \| \d", README, re.MULTILINE)
        terms = [term.partition("/") for term in written.split(" + ")]  # such as `2` or `12/N`
        wanted = sum(float(size) / (stages.NUM_RANKS if divisor == "N" else 1) for size, _, divisor in terms)
        assert sum(stages.held(stage).values()) == wanted
        assert f"{wanted:g} at stage {stage}" in FRONT
