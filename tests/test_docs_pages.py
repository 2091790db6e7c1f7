"""The pages of docs/: what is generated in them is up to date, what they quote exists, and their examples run."""

import ast
import json
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch

import hf_zero
from benchmarks import try_gpu
from benchmarks.gpu import parse_arguments
from hf_zero.planner import predict
from hf_zero.recipes.cli import main
from tests.distributed import run_program
from tests.generated import check_part, part, write_part
from tests.public_models import CONFIGS, MILLIONS, empty_model
from tests.recipes import conftest
from tests.test_readme import ACTIVATE, SCRIPT, fenced_blocks, patched
from tests.tiers import in_core, more
from tests.trials.__main__ import make_parser


tiny_model = conftest.tiny_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GIB = 2**30

COLUMNS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "3, optimizer on the host": {"stage": 3, "offload": "optimizer"},
    "3, parameters too": {"stage": 3, "offload": "params"},
}
TABLED = ["HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"]
TABLED += ["meta-llama/Llama-3.1-70B"]


def blocks(page: str, language: str) -> list[str]:
    found = fenced_blocks((DOCS / page).read_text(encoding="utf-8"))
    return [block.text for block in found if block.language == language]


@pytest.fixture
def writes(request) -> bool:
    return request.config.getoption("--write-docs")


# What is generated


def resting(model: str) -> str:
    """One row of the table."""
    cells = []
    for settings in COLUMNS.values():
        told = predict(empty_model(model), num_ranks=8, compute_dtype=torch.bfloat16, **settings)
        host = f" ({told.host_nbytes / GIB:.1f})" if told.host_nbytes else ""
        cells.append(f"{told.resting_nbytes / GIB:.1f}{host}")
    return f"| {model} | {' | '.join(cells)} |"


def test_the_table_of_stages_has_a_row_for_each_model(writes):
    header = f"| | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}"
    if writes:
        write_part(DOCS / "memory.md", "resting", "\n".join([header, *map(resting, TABLED)]))
    lines = part(DOCS / "memory.md", "resting").splitlines()
    assert "\n".join(lines[:2]) == header
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == TABLED


@pytest.mark.parametrize("model", in_core(TABLED[:1], TABLED))
def test_the_table_of_stages_says_what_is_predicted(model):
    assert resting(model) in part(DOCS / "memory.md", "resting").splitlines(), "run this file with --write-docs"


@pytest.mark.parametrize("model", CONFIGS)
def test_the_models_of_the_tables_have_the_size_that_they_are_known_for(model):
    millions = sum(p.numel() for p in empty_model(model).parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[model], rel=0.005)


def flags_table() -> str:
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in fields(hf_zero.ZeroTrainingArguments):
        if field.name.startswith("zero_"):
            help_text = re.sub(r"--\w+", lambda flag: f"`{flag[0]}`", field.metadata["help"])
            lines.append(f"| `--{field.name}` | {field.default} | {help_text} |")
    return "\n".join(lines)


@pytest.mark.quick
def test_the_table_of_flags_is_made_from_the_fields(writes):
    check_part(DOCS / "flags.md", "flags", flags_table(), writes)


def test_the_flags_of_trainer_have_the_defaults_of_the_table():
    text = (DOCS / "flags.md").read_text(encoding="utf-8").partition("<!-- end flags -->")[2]
    table = dict(re.findall(r"^\| `--(\w+)` \| (\S+) \|", text, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(hf_zero.ZeroTrainingArguments)}
    assert len(table) > 3 and table == {name: str(defaults[name]) for name in table}


# What is quoted


@cache
def messages() -> str:
    """All texts of the package, one a line, with `...` for what is filled in."""
    found = []
    for path in sorted((ROOT / "hf_zero").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def quoted() -> list[str]:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    return [heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)]


def test_the_page_of_errors_has_the_commonest_ones():
    assert len(quoted()) >= 25
    assert len(set(quoted())) == len(quoted())


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("message", quoted())
def test_a_message_in_the_page_of_errors_is_one_of_the_package(message):
    pattern = ".*".join(re.escape(words) for words in message.split("..."))
    assert re.search(pattern, messages()), f"errors.md quotes {message!r}, which nothing says any more"


# Command lines


def command_lines() -> list[tuple[str, str]]:
    """Every command of the pages: lines of bash blocks, and commands between backticks."""
    found = []
    for page in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        lines = [line for block in fenced_blocks(text) if block.language == "bash" for line in _joined(block.text)]
        lines += re.findall(r"`((?:hf-zero|python -m hf_zero\.recipes|torchrun) [^`\n]+)`", text)
        found += [(page.name, line) for line in lines if line.strip() and not line.startswith("#")]
    return list(dict.fromkeys(found))


def _joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.quick(cases=10)
@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_command_in_the_pages_is_one_that_parses(page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_command(shlex.split(line))


def check_command(words: list[str]) -> None:
    """Parses a command as the program that it starts would.

    Raises:
        AssertionError: for a program that the pages should not have.
    """
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    program, *arguments = words
    if program == "hf-zero":
        _check_recipe(arguments)
    elif words[:3] == ["python", "-m", "hf_zero.recipes"]:
        _check_recipe(words[3:])
    elif words[:3] == ["python", "-m", "benchmarks.gpu"]:
        parse_arguments(words[3:])
    elif words[:3] == ["python", "-m", "benchmarks.try_gpu"]:
        try_gpu.parse_arguments(words[3:])
    elif words[:3] == ["python", "-m", "tests.trials"]:
        make_parser().parse_args(words[3:])
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        if parsed.module:
            assert parsed.training_script == "hf_zero.recipes"
            _check_recipe(parsed.training_script_args)
        else:
            assert parsed.training_script == "train.py"
    elif words[:2] == ["accelerate", "launch"]:
        parsed = launch_command_parser().parse_args(words[2:])
        assert parsed.module and parsed.training_script == "hf_zero.recipes"
        assert parsed.num_processes % parsed.num_machines == 0 and parsed.machine_rank < parsed.num_machines
        _check_recipe(parsed.training_script_args)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        _check_extras(arguments[-1])
    elif program == "source":
        assert words == shlex.split(ACTIVATE)
    else:
        assert program == "export", f"{shlex.join(words)}: no test knows this command"


def _check_recipe(words: list[str]) -> None:
    from hf_zero.recipes.cli import make_tool_parser
    from hf_zero.recipes.plan import read_run
    from hf_zero.recipes.run_config import RunConfig
    from hf_zero.recipes.tasks import TASKS, TOOLS

    if len(words) == 1 or words[1] == "--help":  # the name of a task, a tool or a key in a sentence
        assert words[0] in (*TASKS, *TOOLS, "--num_processes")
    elif words[:2] == ["plan", "--config"]:
        read_run(words[1:])
    elif words[0] in TASKS:
        RunConfig.parse(words[0], words[1:])
    elif words[0] in TOOLS:
        assert make_tool_parser(words[0]).parse_known_args(words[1:])[1] == []
    else:
        raise AssertionError(f"{words[0]}: no task or tool")


def _check_extras(requirement: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\[(.*)\]", requirement)
    assert set(extras[1].split(",") if extras else []) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("line", ["hf-zero plam", "hf-zero classify --zero_stag 1", "hf-zero plan --bf16", "make tea"])
def test_a_command_with_a_mistake_is_noticed(line):
    with pytest.raises((AssertionError, ValueError)):
        check_command(shlex.split(line))


# Links of what is not part of the site: Sphinx checks those between the pages of docs/


@pytest.mark.quick
@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_links_to_files_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


# Examples


# Each by a test of its own.
RUN_ELSEWHERE = ["checkpoints.md", "index.md", "memory.md", "recipes.md", "training.md", "tutorial.md"]
PYTHON = {"coming-from.md": 2}  # how many blocks are run here


@pytest.mark.quick
def test_every_block_of_python_is_run_by_a_test():
    counts = {path.name: len(blocks(path.name, "python")) for path in DOCS.glob("*.md")}
    assert {name: count for name, count in counts.items() if count and name not in RUN_ELSEWHERE} == PYTHON


@pytest.mark.full("slow")
def test_the_example_of_fsdp_runs(tmp_path):
    (tmp_path / "example.py").write_text(blocks("coming-from.md", "python")[1], encoding="utf-8")
    (result,) = run_program(["example.py"], tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.full("slow")
def test_the_trainer_of_ones_own_trains_sharded(tmp_path):
    """The script of the README with its classes replaced by those of the page."""
    script = SCRIPT.replace("TrainingArguments(", "MyZeroArguments(zero_stage=3, ").replace(
        "trainer = Trainer(", "trainer = MyZeroTrainer("
    )
    (tmp_path / "script.py").write_text(f"{blocks('coming-from.md', 'python')[0]}\n{script}", encoding="utf-8")
    (result,) = run_program(["script.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "MyZeroTrainer at stage 3"


@pytest.mark.parametrize("program", ["Trainer", *more("DeepSpeed")])
def test_the_changed_lines_turn_a_trainer_script_into_one_that_shards(program, tmp_path):
    of_trainer, _, of_deepspeed = blocks("coming-from.md", "diff")
    script, diff = SCRIPT.replace('"out", max', '"out", deepspeed="ds_config.json", max'), of_deepspeed
    if program == "Trainer":
        imports, diff = of_trainer.splitlines()[:2], "\n".join(of_trainer.splitlines()[2:])
        assert imports[1] == "+from hf_zero import ZeroTrainer, ZeroTrainingArguments"
        script = SCRIPT
    script = f"from hf_zero import ZeroTrainer, ZeroTrainingArguments\n{patched(script, diff)}"
    assert "deepspeed" not in script
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (result,) = run_program(["script.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "ZeroTrainer at stage 3"


def test_the_file_that_migrate_takes_is_json(tmp_path, monkeypatch, capsys):
    """The page's command, on a file of that name."""
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (line,) = blocks("coming-from.md", "bash")[0].splitlines()
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == "--max_grad_norm 0 --zero_stage 2"
