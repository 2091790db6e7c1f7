"""docs/tutorial.md runs from its first block to its last, in one folder, and ends with the answer that it promises."""

import re
import shlex
from pathlib import Path

from tests.recipes.ranks import run_on_ranks
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
            num_ranks = int(arguments[arguments.index("--num_processes") + 1]) if "--num_processes" in arguments else 1
            first, *_ = run_on_ranks(arguments, tmp_path, num_ranks)
            assert first.code == 0, first.err
            outputs.append(first.out)

    left, start = re.search(r"`checkpoint-(\d+)`", TEXT)[1], re.search(r"step (\d+):", TEXT)[1]
    first, second, answer = outputs
    assert int(start) == int(left) + 1
    assert f"checkpoint-{left}" not in first and f"checkpoint-{left}" in second
    assert (tmp_path / "capitals" / "report.html").is_file()
    promised = re.search(r"It prints `(.+)`\.", TEXT)[1]
    assert capsys.readouterr().out.splitlines()[-1] == promised
    assert promised.endswith(f"? {answer.strip()}")
