"""The last lines of a run."""

import shlex
import subprocess
import sys

import pytest

from hf_zero.recipes.artifacts import usage_command
from hf_zero.recipes.page import memory_table


pytestmark = pytest.mark.quick


def test_the_table_shows_the_largest_rank_beside_data_parallelism():
    buffers = {"buffer_nbytes": 2**19}
    names = ("parameter_nbytes", "gradient_nbytes", "optimizer_nbytes")
    small = dict(zip(names, (2**20, 2**20, 2**21), strict=True))
    ddp = {f"ddp_{name}": 4 * small[name] for name in names}
    table = memory_table([small | ddp | buffers, {**small, "parameter_nbytes": 2**21} | ddp | buffers], zero_stage=3)
    assert [line.split()[-3:] for line in table.splitlines()[1:]] == [
        ["2.0", "4.0", "0.50"],
        ["1.0", "4.0", "0.25"],
        ["2.0", "8.0", "0.25"],
        ["0.5", "-", "-"],
        ["5.5", "16.0", "0.34"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_command_survives_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, text = 'it\'s a "folder" \\', 'say "it\'s $HOME" é 🙂'
    words = shlex.split(usage_command(folder, text))
    assert words[0] == sys.executable and words[1] == "-c"
    code = words[2].replace("from transformers import pipeline;", "pipeline = lambda *a: lambda *b: repr(a + b);")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == repr(("text-classification", folder, text))


def test_a_python_below_this_folder_is_written_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert usage_command("out", "text").startswith(".venv/bin/python -c ")
