"""Whole runs, in real processes, of a model that trains in seconds."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.distributed import run_program
from tests.output import without_imports
from tests.recipes.conftest import write_csv
from tests.recipes.ranks import run_on_ranks


RUN = ["-m", "hf_zero.recipes", "classify"]


@pytest.fixture
def flags(tiny_model, csv_file, tmp_path) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_model}\ntrain_file: {csv_file}\noutput_dir: out\nnum_train_epochs: 6\n"
        "learning_rate: 0.005\nlogging_steps: 5\nsave_strategy: 'no'\nreport_to: none\n"
        "train_sampling_strategy: group_by_length\n",
        encoding="utf-8",
    )
    return ["--config", "recipe.yaml"]


def accuracies(output: str) -> tuple[float, float]:
    before, after = re.search(r"test accuracy: ([\d.]+) before, ([\d.]+) after", output).groups()
    return float(before), float(after)


def check_run(result: subprocess.CompletedProcess, folder: Path) -> None:
    assert result.returncode == 0, result.stderr
    assert accuracies(result.stdout)[1] >= 0.9
    assert re.search(r"'loss': '[\d.]+'.*'zero/tokens_per_second': ", result.stdout + result.stderr)
    assert "saved to out\n" in result.stdout
    # Said once: the other ranks are silent.
    assert result.stdout.count("test accuracy before training") == 1
    assert {"tokenizer.json", "report.html", "resolved.yaml", "training_log.jsonl", "README.md"} <= {
        path.name for path in (folder / "out").iterdir()
    }


@pytest.mark.quick
def test_two_processes_learn_and_the_command_that_is_told_works(flags, tmp_path):
    (result,) = run_program([*RUN, *flags, "--num_processes", "2", "--zero_stage", "3"], tmp_path)
    check_run(result, tmp_path)
    told = re.search(r"^try it: (.*)$", result.stdout, re.MULTILINE)[1]
    program, flag, script = shlex.split(told)
    assert Path(program).name.startswith("python") and flag == "-c"
    (tmp_path / "told.py").write_text(script, encoding="utf-8")
    (command,) = run_program(["told.py"], tmp_path)  # whose ranks have imported transformers
    assert re.search(r"'label': '(food|film)'", command.stdout), command.stderr


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
TORCHRUN += ["--rdzv_endpoint", "127.0.0.1:0", "--local_addr", "127.0.0.1"]


@pytest.mark.full("slow")
@pytest.mark.parametrize("launcher", [TORCHRUN, []], ids=["torchrun", "none"])
def test_torchrun_or_no_launcher_starts_the_same_run(launcher, flags, tmp_path):
    (result,) = run_program([*launcher, *RUN, *flags, "--zero_stage", "2"], tmp_path)
    check_run(result, tmp_path)


@pytest.mark.full("slow")
def test_an_error_in_the_processes_comes_out_as_one_line(flags, tmp_path):
    rows = write_csv(tmp_path / "rows.csv", [("text", "label"), ("a cold soup", "food"), ("a dull film", "")])
    (result,) = run_program([*RUN, *flags, "--num_processes", "2", "--train_file", str(rows)], tmp_path)
    assert result.returncode == 1
    assert without_imports(result.stderr).strip() == (
        f"hf-zero: {rows}: line 3: nothing in column 'label'; correct it, or leave such rows out with --skip_bad_rows"
    )
    assert not (tmp_path / "out").exists()


def test_what_cannot_work_ends_a_real_process_with_one_line(flags, tmp_path):
    (result,) = run_program([*RUN, *flags, "--num_processes", "2", "--max_length=65"], tmp_path)
    said = without_imports(result.stderr)
    assert result.returncode == 2
    assert "has 64 positions" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_settings_that_contradict_each_other_come_out_as_one_line(flags, tmp_path):
    first, _ = run_on_ranks(["classify", *flags, "--num_processes", "2", "--bf16", "--fp16"], tmp_path)
    assert first.code == 2
    assert re.fullmatch(r"hf-zero, rank 0: .*(bf16.*fp16|fp16.*bf16).*", first.err.strip())
    assert not (tmp_path / "out").exists()


def test_a_trained_folder_is_a_model_to_go_on_from(flags, tmp_path, tiny_model):
    """`out` is a folder like any other: here it is the model of the next run, in place."""
    (first,) = run_on_ranks(["classify", *flags, "--num_train_epochs", "1"], tmp_path, num_ranks=1)
    assert first.code == 0, first.err
    shutil.copytree(tmp_path / "out", tmp_path / "start")
    again = ["--model_name_or_path", "./start", "--max_steps", "1", "--overwrite_output_dir"]
    (second,) = run_on_ranks(["classify", *flags, *again], tmp_path, num_ranks=1)
    assert second.code == 0, second.err
    assert accuracies(second.out)[0] == accuracies(first.out)[1]
