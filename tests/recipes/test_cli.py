"""What the command line says before any task or tool has run."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_zero.recipes import cli, parser
from hf_zero.recipes.parser import COMMANDS, KEYS
from hf_zero.recipes.tasks import TASKS, TOOLS


ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_the_usage_lists_every_task_and_tool(capsys):
    assert cli.main([]) == 0
    usage = capsys.readouterr().out
    for name, entry in (TASKS | TOOLS).items():
        assert re.search(rf"^  {name} +{re.escape(entry.summary)}$", usage, re.MULTILINE), name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("clasify", "did you mean classify?"),
        ("verfy", "did you mean verify?"),
        ("ppo", "use grpo"),
        ("qlora", "use sft --use_peft --load_in_4bit"),
        ("qxz", "nothing here is called like it; see --help"),
    ],
)
def test_of_a_name_that_nobody_has_the_nearest_or_what_stands_for_it_is_told(name, told, capsys):
    assert cli.main([name]) == cli.EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert error.startswith(f"hf-zero: task {name!r}: {told}; expected one of ") or f"{told} expected one of " in error
    assert error.count("\n") == 1


def test_what_other_names_are_told_to_stand_for_exists():
    from hf_zero.recipes.run_config import make_parser

    assert {*KEYS} <= {action.dest for task in TASKS for action in make_parser(task)._actions}
    assert {command.split()[0] for command in COMMANDS} <= {*TASKS, *TOOLS}


def test_the_script_is_the_module_under_another_name(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {parser.SCRIPT: "hf_zero.recipes.cli:console"}
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hf-zero", "verify", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.console()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: hf-zero verify [-h]")


def _run_script(script: str, folder: Path) -> subprocess.CompletedProcess:
    run, environment = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["['--help']", "['list']", "['migrate', 'ds_config.json']"])
def test_what_computes_nothing_starts_without_torch(command, tmp_path):
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}}', encoding="utf-8")
    script = (
        "import sys\n"
        "from hf_zero.recipes.cli import main\n"
        f"assert main({command}) == 0\n"
        "sys.exit(', '.join({'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()))\n"
    )
    result = _run_script(script, tmp_path)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_what_it_works_on(tool, monkeypatch):
    """Its positionals reach `run` before the arguments; one without takes none."""
    from hf_zero.recipes.cli import run_tool

    module, calls = TOOLS[tool].load(), []
    monkeypatch.setattr(module, "run", lambda *values: calls.append(values))
    positional = [f"some {name}" for name, _ in module.POSITIONAL]
    run_tool(tool, positional)
    ((*given, arguments),) = calls
    assert given == positional
    assert isinstance(arguments, module.Arguments)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["sft", "--train_file", "none.jsonl"], 2, "none.jsonl: no such file; check train_file"),
        (["sft", "--config=here.yaml", "--train_file=rows.jsonl"], 2, "gone.jsonl: no such file; check test_file"),
        (["sft", "--config", "nowhere.yaml"], 2, "--config nowhere.yaml: no such file, nor a ready-made recipe"),
        (["plan", "--config", "nowhere.yaml"], 2, "--config nowhere.yaml: no such file, nor a ready-made recipe"),
        (["plan", "./gone", "--bf16"], 2, "model './gone': no such folder; give a folder that from_pretrained loads"),
        (["plan", "confg.json"], 2, "model 'confg.json': no such folder; give a folder that from_pretrained loads"),
        (
            ["plan", "here.yaml"],
            2,
            "model 'here.yaml': is a YAML file; to plan the run of a file, use --config here.yaml",
        ),
        (["chat", "out/final/gone"], 2, "folder 'out/final/gone': no such folder; give a folder"),
        (["verify", "gone"], 1, "gone: does not exist; give the folder of a saved model"),
        (["merge", "gone"], 1, "gone: does not exist; give the folder of a saved model"),
        (["push", "gone", "--hub_model_id=a/b"], 1, "gone: does not exist; give the folder of a saved model"),
        (["convert", "gone", "new"], 1, "gone: does not exist; give the folder of a saved model"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(argv, code, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    (tmp_path / "here.yaml").write_text("task: sft\ntest_file: gone.jsonl\noutput_dir: out\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*argv, "--output_dir=out"] if argv[0] in ("sft", "merge") else argv) == code
    error = capsys.readouterr().err
    assert error.startswith(f"hf-zero: {message}") and error.count("\n") == 1
