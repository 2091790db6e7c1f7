"""What cannot work is refused in one line, before a process is started and without leaving anything behind."""

import shutil

import pytest

from hf_zero.accelerator.named_settings import LAUNCHER_VARIABLES
from hf_zero.recipes import launch
from hf_zero.recipes.cli import main


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def refusal(tmp_path, tiny_model, csv_file, monkeypatch, capsys):
    """Calls the command line with good arguments and some bad ones; gives the exit code and the one line."""
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("hf_zero.recipes.run.run_task", lambda *_: pytest.fail("the run was started"))
    for name in (*LAUNCHER_VARIABLES, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)

    def call(*bad: str, **environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        good = f"--model_name_or_path={tiny_model} --train_file={csv_file} --output_dir={tmp_path / 'out'}".split()
        processes = [] if "RANK" in environment else ["--num_processes=2"]
        before = sorted(tmp_path.rglob("*"))
        code = main(["classify", *good, *processes, *bad])
        output = capsys.readouterr()
        assert output.out == ""
        rank = f", rank {environment['RANK']}" if "RANK" in environment else ""
        assert output.err.startswith(f"hf-zero{rank}: ")
        assert output.err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return code, output.err

    return call


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("--zero_stage=7", "zero_stage: 7 is not one of 0, 1, 2, 3; the nearest is '3'"),
        ("--zero_stage=three", "invalid int value: 'three'"),
        ("--zero_reduce_dtype=bf8", "zero_reduce_dtype: 'bf8' is not one of fp32, bf16, int8\n"),
        (
            "--fsdp=full_shard",
            "--fsdp: cannot be combined with hf_zero, which does the sharding itself; remove it and use --zero_stage",
        ),
        ("--deepspeed=ds.json", "--deepspeed: cannot be combined with hf_zero, which does the sharding itself"),
        ("--model_name_or_path=./nowhere", "model_name_or_path './nowhere': no such folder"),
        ("--model_name_or_path=", "model_name_or_path: not set"),
        ("--dataset_name=python_docstrings", "data: dataset_name 'python_docstrings' and train_file "),
        ("--max_length=1", "max_length 1: expected 8 or more"),
        ("--num_processes=0", "--num_processes 0: expected 1 or more"),
        ("--learning_rat=1", "did you mean --learning_rate?"),
    ],
)
def test_a_bad_setting_is_refused_with_exit_code_2(refusal, bad, message):
    code, line = refusal(bad)
    assert code == 2
    assert message in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not a number of processes"),
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP: cannot be combined with hf_zero"),
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, "ACCELERATE_USE_DEEPSPEED: cannot be combined with hf_zero"),
    ],
)
def test_an_environment_that_contradicts_is_refused_with_exit_code_2(refusal, environment, message):
    code, line = refusal(**environment)
    assert code == 2
    assert message in line


def test_num_processes_has_to_agree_with_the_launcher(refusal):
    code, line = refusal("--num_processes=3", **TORCHRUN)
    assert code == 2
    assert "--num_processes 3, but the launcher set WORLD_SIZE=2" in line


def test_an_output_dir_below_a_file_is_refused(refusal, csv_file):
    code, line = refusal(f"--output_dir={csv_file}/out")
    assert code == 2
    assert f"{csv_file} is not writable (Not a directory)" in line


def test_an_output_dir_that_may_not_be_written_is_refused(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.trainer.checks._unwritable", lambda _: "Permission denied")  # root may write anywhere
    code, line = refusal(f"--output_dir={tmp_path}/new/folder")
    assert code == 2
    assert f"{tmp_path} is not writable" in line


def test_a_data_set_without_the_column_is_refused_with_the_columns_it_has(refusal, csv_file):
    code, line = refusal("--label_column=topic")
    assert code == 1
    assert f"{csv_file}: columns found ['text', 'label'], column expected 'topic'" in line


def test_a_truncated_model_is_refused(refusal, tiny_model, tmp_path_factory):
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("truncated") / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    code, line = refusal(f"--model_name_or_path={folder}")
    assert code == 1
    assert "truncated, damaged, or not a safetensors file" in line
