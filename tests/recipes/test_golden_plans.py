"""What `plan` prints for each ready-made file is compared with a file of the repository, so a change in the planner or
in a task that changes a prediction shows in the diff."""

import re
from pathlib import Path

import pytest
import yaml

from hf_zero.recipes.cli import main
from tests.public_models import CONFIGS, config_of


ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_plans.txt")
FILES = sorted((ROOT / "recipes").glob("*.yaml"))


def planned_text(path: Path, folder: Path, capsys: pytest.CaptureFixture) -> str:
    """The output of `plan` for a file, on the largest number of H100s that its comment names, at most 8 on a host."""
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    num_ranks = max(map(int, re.findall(r"^# Each of (\d+) GPUs", text, re.MULTILINE)), default=1)
    argv = ["plan", "--config", str(path), "--num_processes", str(num_ranks)]
    argv += ["--gpu", "h100", "--hosts", str(max(1, num_ranks // 8))]
    if content["task"] == "grpo":  # the lengths of prompts decide how many tokens a row has
        argv += ["--num_tokens", "1024"]
    name = content["model_name_or_path"]
    if name in CONFIGS:
        config_of(name).save_pretrained(folder)
        argv += ["--model_name_or_path", str(folder)]
    capsys.readouterr()
    code = main(argv)
    output = capsys.readouterr()
    assert code == 0, f"{path.name}: {output.err}"
    return f"== {path.stem}\n{output.out.replace(str(folder), name)}"


def test_plans_of_ready_made_files_are_as_before(tmp_path, capsys, request):
    found = "\n".join(planned_text(path, tmp_path / path.stem, capsys) for path in FILES)
    if request.config.getoption("--write-docs"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), "if the change is meant, run this test with --write-docs"
