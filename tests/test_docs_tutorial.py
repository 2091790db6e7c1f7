"""docs/tutorial.md runs from its first block to its last, in one folder, and ends with the answer that it promises."""

import re
import shlex
from pathlib import Path

from tests.recipes.test_run import run_command
from tests.test_readme import fenced_blocks


TEXT = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_tutorial_runs_from_rows_to_the_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, outputs = {}, []
    for block in fenced_blocks(TEXT):
        if block.language == "python":
            exec(block.text, names)
        else:
            program, *arguments = shlex.split(block.text.replace("\\\n", " "))
            assert (block.language, program) == ("bash", "hf-zero")
            result = run_command(["-m", "hf_zero.recipes", *arguments], tmp_path)
            assert result.returncode == 0, result.stderr
            outputs.append(result.stdout)

    left, start = re.search(r"`checkpoint-(\d+)`", TEXT)[1], re.search(r"step (\d+):", TEXT)[1]
    first, second, answer = outputs
    assert int(start) == int(left) + 1
    assert f"checkpoint-{left}" not in first and f"checkpoint-{left}" in second
    assert (tmp_path / "capitals" / "report.html").is_file()
    promised = re.search(r"It prints `(.+)`\.", TEXT)[1]
    assert capsys.readouterr().out.splitlines()[-1] == promised
    assert promised.endswith(f"? {answer.strip()}")
