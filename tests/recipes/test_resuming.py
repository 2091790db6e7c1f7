"""Whether a run goes on, and from where; what the resolved configuration keeps and what it does not."""

import json
import re
import shlex
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_zero.accelerator.named_settings import LAUNCHER_VARIABLES
from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.cli import main
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.data.sources import load_rows
from hf_zero.recipes.output_dir import (
    RESOLVED_NAME,
    check_rows,
    check_unchanged,
    checkpoint_of,
    record_start,
    resolved_text,
    resume_message,
)
from hf_zero.recipes.report import without_folders
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS, SourceArguments
from hf_zero.trainer import resumable


@pytest.fixture
def call(tmp_path, command_line):
    """The command line over a folder with a checkpoint; gives what `command_line` gives."""
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    text = resolved_text(RunConfig.parse("classify", command_line.argv))
    (tmp_path / "out" / RESOLVED_NAME).write_text(text, encoding="utf-8")
    return partial(command_line, "classify")


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--max_length=64", "max_length: 64 now, 128 in the run that"),
        ("--seed=7", "seed: 7 now, 42 in the run that"),
        ("--max_train_rows=50", "max_train_rows: 50 now, None in the run that"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_in_one_line(call, changed, message):
    code, line, ran = call(changed)
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert message in line
    assert line.rstrip().endswith("go on with the same, or give another output_dir or --overwrite_output_dir")
    assert call(changed, "--overwrite_output_dir")[::2] == (0, True)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "place"), [(12, 3.0, "step 6 of 12"), (-1, 5.0, "step 6, epoch 3 of 5")]
)
def test_the_message_of_a_longer_run_says_how_far_that_one_is(max_steps, epochs, place, tmp_path):
    state = {"global_step": 6, "max_steps": 6, "epoch": 3.0}  # of the run that has ended
    (tmp_path / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    training = SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs)
    config = RunConfig.parse("sft", [f"--output_dir={tmp_path}"])
    assert f"{tmp_path}, {place}; " in resume_message(str(tmp_path), config, training)


def test_a_changed_norm_to_clip_to_is_named(tmp_path):
    once = RunConfig.parse("sft", [f"--output_dir={tmp_path}"])
    (tmp_path / RESOLVED_NAME).write_text(resolved_text(once), encoding="utf-8")
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}', encoding="utf-8")
    training = SimpleNamespace(max_steps=4, num_train_epochs=3)
    place = f"resume: going on from {checkpoint}, step 2 of 4"
    assert resume_message(str(checkpoint), once, training).startswith(f"{place}; ")
    again = RunConfig.parse("sft", [f"--output_dir={tmp_path}", "--max_grad_norm=0.5"])
    expected = f"{place}, with max_grad_norm 0.5 as given (it was 1.0); "
    assert resume_message(str(checkpoint), again, training).startswith(expected)


@pytest.mark.parametrize("changed", ["--learning_rate=1", "--max_steps=9", "--num_train_epochs=9", "--zero_stage=1"])
def test_how_it_is_trained_may_change(call, changed):
    assert call(changed)[::2] == (0, True)


def checked(tmp_path, task: str, before: list[str], now: list[str]) -> None:
    once, again = (RunConfig.parse(task, [f"--output_dir={tmp_path}", *argv]) for argv in (before, now))
    (tmp_path / RESOLVED_NAME).write_text(resolved_text(once), encoding="utf-8")
    check_unchanged(again, tmp_path)


@pytest.mark.parametrize("changed", ["--dataset_num_proc=2", "--skip_bad_rows", "--attn_implementation=sdpa"])
def test_how_rows_are_read_and_attention_is_computed_may_change(tmp_path, changed):
    checked(tmp_path, "sft", [], [changed])


def test_a_test_set_may_be_added(tmp_path):
    checked(tmp_path, "sft", [], ["--test_file=rows.jsonl", "--max_test_rows=3"])
    with pytest.raises(ConfigError, match="^test_file: 'rows.csv' now, None in the run"):  # a fifth was held out
        checked(tmp_path, "classify", [], ["--test_file=rows.csv"])


def test_other_rows_or_another_order_are_refused(tmp_path):
    lines = [f'{{"text": "row {number}"}}\n' for number in range(2500)]
    settings = RunConfig.parse("sft", [f"--output_dir={tmp_path}"])
    changed = [[*lines, '{"text": "more"}\n'], [*lines[1:], lines[0]], lines[:-1]]

    def data_of(lines) -> Data:
        (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        arguments = SourceArguments(train_file=str(tmp_path / "rows.jsonl"))
        return Data(None, None, None, "rows.jsonl", rows=[load_rows(arguments, "train")])

    found = data_of(lines).rows_summary()
    assert found.startswith("2,500 rows, ")
    (tmp_path / RESOLVED_NAME).write_text(resolved_text(settings), encoding="utf-8")
    check_rows(data_of(lines), tmp_path)  # of a run that did not note them
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(shard=lambda _: SimpleNamespace(comm=Comm(torch.device("cpu"), 60.0))),
        model=None,
        args=SimpleNamespace(output_dir=tmp_path),
    )
    record_start(trainer, settings, found)
    check_rows(data_of(lines), tmp_path)
    for other in changed:
        with pytest.raises(
            ConfigError, match="^rows.jsonl: 2,.* rows, .* now, 2,500 rows, .* in the run that .*; give"
        ):
            check_rows(data_of(other), tmp_path)


@pytest.mark.parametrize("changed", ["--max_length=64", "--loss_type=ipo", "--beta=0.5"])
def test_what_preferences_teach_may_not_change(tmp_path, changed):
    with pytest.raises(ConfigError, match=f"^{changed[2:].partition('=')[0]}: .* now, .* in the run that"):
        checked(tmp_path, "dpo", [], [changed])


def test_the_decisive_arguments_of_tasks_exist():
    for name, task in TASKS.items():
        assert set(getattr(task.load(), "decisive", ())) <= set(RunConfig.parse(name, []).training)


def test_another_task_is_another_run(call, tmp_path):
    path = tmp_path / "out" / RESOLVED_NAME
    path.write_text(path.read_text(encoding="utf-8").replace("task: classify", "task: sft"), encoding="utf-8")
    code, line, ran = call()
    assert (code, ran) == (2, False)
    assert "task: 'classify' now, 'sft' in the run that" in line


@pytest.mark.parametrize("content", ["a: [", "- 1\n"])
def test_a_configuration_that_cannot_be_read_is_told(call, tmp_path, content):
    (tmp_path / "out" / RESOLVED_NAME).write_text(content, encoding="utf-8")
    code, line, ran = call()
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "--overwrite_output_dir starts over" in line


def test_a_checkpoint_that_is_named_has_to_be_there_and_complete(call, tmp_path):
    code, line, ran = call(f"--resume={tmp_path / 'nowhere'}")
    assert (code, ran) == (2, False)
    assert "nowhere': no such folder; give auto, never or a checkpoint's folder" in line
    code, line, ran = call(f"--resume={tmp_path / 'out' / 'checkpoint-3'}")
    assert (code, ran, line.count("\n")) == (1, False, 1)
    assert "checkpoint-3" in line


def test_checkpoints_none_of_which_is_complete_are_not_given_up_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable, "gather_object", lambda found: found)
    for step in (3, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    training = SimpleNamespace(output_dir=str(tmp_path), process_index=0, zero_resume_strict=False)
    argv, lines = [f"--output_dir={tmp_path}"], []
    with pytest.raises(CheckpointError, match=r"\(checkpoint-12: .*; checkpoint-3: .*\); --overwrite_output_dir"):
        checkpoint_of(RunConfig.parse("classify", argv), training, lines.append)
    assert [line.partition(" is ")[0] for line in lines] == [str(tmp_path / f"checkpoint-{step}") for step in (12, 3)]
    assert checkpoint_of(RunConfig.parse("classify", [*argv, "--resume=never"]), training, lines.append) is None
    for step in (3, 12):
        (tmp_path / f"checkpoint-{step}").rmdir()
    assert checkpoint_of(RunConfig.parse("classify", argv), training, lines.append) is None


def test_the_model_that_a_run_starts_from_is_not_removed(call, tiny_model, tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-3"
    shutil.copytree(tiny_model, checkpoint, dirs_exist_ok=True)
    code, line, ran = call(f"--model_name_or_path={checkpoint}", "--overwrite_output_dir")
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "is among the checkpoints that --overwrite_output_dir removes; give another output_dir" in line
    assert call(f"--model_name_or_path={checkpoint}", "--resume=never", f"--output_dir={tmp_path / 'b'}")[::2] == (
        0,
        True,
    )


def test_the_longer_name_of_trainer_says_the_same():
    settings = RunConfig.parse("classify", ["--resume_from_checkpoint", "out/checkpoint-7"])
    assert settings.resume == "out/checkpoint-7"
    assert RunConfig.parse("classify", ["--resume_from_checkpoint", "True"]).resume == "auto"
    with pytest.raises(Exception, match="give one of them"):
        RunConfig.parse("classify", ["--resume_from_checkpoint", "a", "--resume", "b"])


def test_a_file_for_another_task_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("task: sft\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"task 'sft': .*recipe.yaml is not for classify"):
        RunConfig.parse("classify", ["--config", str(path)])


def test_the_resolved_configuration_gives_the_same_settings_and_keeps_no_secret(tmp_path):
    argv = ["--bf16", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--label_names", "labels", "more"]
    argv += ["--learning_rate=3e-7", "--hub_token", "hf_secret", "--num_processes", "2", "--text_column", "no"]
    once = RunConfig.parse("classify", [*argv, "--output_dir", str(tmp_path)])
    text = resolved_text(once)
    path = tmp_path / RESOLVED_NAME
    path.write_text(text, encoding="utf-8")
    again = RunConfig.parse("classify", ["--config", str(path)])
    assert again.arguments == once.arguments and again.num_processes == 2
    assert again.training == {**once.training, "hub_token": None}
    assert "hf_secret" not in text
    own, defaults = text.split("# Defaults,")
    assert set(yaml.safe_load(own)) == {
        *("task", "text_column", "output_dir", "bf16", "lr_scheduler_kwargs", "label_names", "learning_rate"),
        "num_processes",
    }
    assert re.search(r"^zero_stage: 3$", defaults, re.MULTILINE)


@pytest.mark.parametrize("argv", [["--max_length=auto"], ["--config=FILE"]])
def test_the_longest_rows_are_for_plan_to_find(tmp_path, argv):
    pytest.importorskip("trl")
    (tmp_path / "run.yaml").write_text("max_length: auto\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="max-length: 'auto': auto is for hf-zero plan"):
        RunConfig.parse("sft", [flag.replace("FILE", str(tmp_path / "run.yaml")) for flag in argv])


def test_the_command_in_the_resolved_configuration_finds_it_and_starts_anew():
    settings = RunConfig.parse("classify", ["--output_dir", "out/my run"])
    command = resolved_text(settings).splitlines()[0].partition(": ")[2]
    assert shlex.split(command)[-4:] == ["--config", "out/my run/resolved.yaml", "--output_dir", "out/my run-again"]


def test_others_see_names_in_place_of_folders(tmp_path):
    settings = RunConfig.parse("classify", [f"--train_file={tmp_path / 'gone.csv'}", "--model_name_or_path=org/name"])
    text = f"{tmp_path / 'gone.csv'}: 3 rows, org/name"
    assert without_folders(text, settings.non_default()) == "gone.csv: 3 rows, org/name"


def test_a_dry_run_tells_all_and_writes_nothing(tiny_model, csv_file, tmp_path, monkeypatch, capsys):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    before = sorted(tmp_path.rglob("*"))
    argv = (
        f"--model_name_or_path={folder} --train_file={csv_file} --output_dir=out --num_processes=2 --use_cpu".split()
    )
    assert main(["classify", *argv, "--zero_stage=2", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert re.search(r"^  zero_stage: 2$", said, re.MULTILINE) and "learning_rate" not in said
    assert "'the soup was cold and the waiter was cold' -> food" in said
    assert re.search(r"^  root +1,682 parameters$", said, re.MULTILINE)
    assert re.search(r"bert.encoder.layer.0 to bert.encoder.layer.1 +2,224 parameters each", said)
    assert "in all 6,130 parameters in 3 units, 6,130 of them trained" in said
    assert "a micro-batch: 8 rows x 64 tokens" in said  # what the model takes, though max_length is more
    assert re.search(r"optimizer state +float32 +0.02 MiB  1/2 of all", said)


def test_a_dry_run_is_one_process(monkeypatch, capsys, tiny_model, csv_file, tmp_path):
    for name, value in zip(LAUNCHER_VARIABLES, ("1", "2", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    argv = [f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", f"--output_dir={tmp_path / 'out'}"]
    assert main(["classify", *argv, "--dry_run"]) == 2
    assert "the launcher has started 2; leave the launcher out" in capsys.readouterr().err
