"""The last lines of a run."""

import shlex
import subprocess
import sys

import pytest

from hf_zero.recipes.report import memory_table, usage_command


pytestmark = pytest.mark.quick


def test_the_table_shows_each_rank_beside_data_parallelism():
    report = {"parameter_nbytes": 2**20, "optimizer_nbytes": 2**21, "ddp_parameter_nbytes": 2**22}
    table = memory_table([report, {**report, "host_nbytes": 2**19}])
    assert table == [
        ["between backward and optimizer step", "rank 0", "rank 1", "DDP"],
        ["parameters", "1.00", "1.00", "4.00"],
        ["optimizer state", "2.00", "2.00", "0.00"],
        ["on the host", "0.00", "0.50", "0.00"],
    ]


def test_the_command_survives_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, text = 'it\'s a "folder" \\', 'say "it\'s $HOME" é 🙂'
    words = shlex.split(usage_command(folder, text))
    assert words[0] == sys.executable and words[1] == "-c"
    code = words[2].replace("from transformers import pipeline;", "pipeline = lambda *a: lambda *b: repr(a + b);")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == repr(("text-classification", folder, text))
