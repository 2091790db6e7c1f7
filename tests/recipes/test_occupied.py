"""A model that a run has left in `output_dir` is neither lost unasked nor trained again."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from hf_zero.comm import Comm
from hf_zero.recipes.output_dir import (
    RESOLVED_NAME,
    RUN_NAME,
    _is_longer,
    finished_message,
    read_run,
    record_start,
    remove_checkpoints,
    resolved_text,
)
from hf_zero.recipes.report import REPORT_NAME
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS
from tests.recipes.ranks import run_on_ranks


# Flags of tasks whose rows have no largest length.
GENERATING = ["--max_completion_length=16"]
FLAGS = {
    "grpo": [*GENERATING, "--reward_funcs=think_format_reward"],
    "rloo": [*GENERATING, "--reward_funcs=think_format_reward"],
    "distill": [*GENERATING, "--teacher_{model}"],
}
FINISHED = (RESOLVED_NAME, RUN_NAME, "model.safetensors")


@pytest.fixture
def call(tmp_path, command_line):
    """The command line over a folder in which a run has left some files; gives what `command_line` gives."""

    def call(task: str, *more: str, left=FINISHED) -> tuple[int, str, bool]:
        model = command_line.argv[0].lstrip("-")
        own = [flag.format(model=model) for flag in FLAGS.get(task, ["--max_length=64"])]
        out, argv = tmp_path / "out", [*command_line.argv, *own]
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        texts = {RESOLVED_NAME: resolved_text(RunConfig.parse(task, argv))}
        texts[RUN_NAME] = '{"finished": true, "step": 100, "loss": 0.5}'
        for name in left:
            (out / name).mkdir() if name.startswith("checkpoint") else (out / name).write_text(texts.get(name, ""))
        return command_line(task, *own, *more)

    return call


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_another_run_is_not_overwritten_by_any_task(call, task):
    code, line, ran = call(task, "--learning_rate=0.5")
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "holds a model of another run (learning_rate: 0.5 now, " in line
    assert line.rstrip().endswith("give another output_dir, or --overwrite_output_dir, which replaces it")
    assert call(task, "--learning_rate=0.5", "--overwrite_output_dir")[::2] == (0, True)


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (["model-00001-of-00002.safetensors"], f"there is no {RESOLVED_NAME}"),
        (["adapter_model.safetensors", RESOLVED_NAME], "it has not finished"),
        (["pytorch_model.bin", RUN_NAME], f"there is no {RESOLVED_NAME}"),
    ],
)
def test_a_model_that_nothing_tells_of_is_not_overwritten(call, left, reason):
    code, line, ran = call("classify", left=left)
    assert (code, ran) == (2, False)
    assert f"holds a model of another run ({reason})" in line


@pytest.mark.parametrize("left", [[], [RESOLVED_NAME, RUN_NAME], ["notes.txt", "training_args.bin"]])
def test_a_folder_without_a_model_is_free(call, left):
    assert call("classify", "--learning_rate=0.5", left=left)[::2] == (0, True)


def test_a_checkpoint_of_elsewhere_does_not_write_over_another_model_either(call, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.recipes.output_dir.check_resumable", lambda *_, **__: None)
    (tmp_path / "b" / "checkpoint-3").mkdir(parents=True)
    code, line, ran = call("classify", "--learning_rate=0.5", f"--resume={tmp_path / 'b' / 'checkpoint-3'}")
    assert (code, ran) == (2, False)
    assert "holds a model of another run" in line


def test_the_model_that_is_trained_further_in_place_is_replaced_only_if_that_is_asked_for(call, tmp_path, tiny_model):
    argv = ["classify", f"--model_name_or_path={tmp_path / 'b'}", f"--output_dir={tmp_path / 'b'}"]
    shutil.copytree(tiny_model, tmp_path / "b")
    assert "holds a model of another run" in call(*argv)[1]
    assert "holds model.safetensors of an earlier run; give another output_dir, or" in call(*argv, "--resume=never")[1]
    assert call(*argv, "--overwrite_output_dir")[::2] == (0, True)


def test_a_run_that_replaces_another_removes_its_checkpoints_and_nothing_else(tmp_path):
    kept = {"notes.txt", "model.safetensors", "checkpoint-best", RESOLVED_NAME}
    for name in kept:
        (tmp_path / name).mkdir() if name.startswith("checkpoint") else (tmp_path / name).touch()
    (tmp_path / "checkpoint-5").mkdir()
    remove_checkpoints(_trainer_in(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept


def _trainer_in(folder) -> SimpleNamespace:
    shard = lambda _: SimpleNamespace(comm=Comm(torch.device("cpu"), 60.0))  # noqa: E731
    return SimpleNamespace(
        accelerator=SimpleNamespace(shard=shard), model=None, args=SimpleNamespace(output_dir=folder)
    )


def test_a_run_that_begins_or_goes_on_has_not_finished(tmp_path):
    settings = RunConfig.parse("classify", [f"--output_dir={tmp_path}"])
    for name in FINISHED:
        (tmp_path / name).touch()
    (tmp_path / RUN_NAME).write_text('{"finished": true, "step": 3}')
    record_start(_trainer_in(tmp_path), settings)
    assert not read_run(tmp_path)["finished"]
    assert finished_message(settings, tmp_path) is None


BEHIND = (*FINISHED, "checkpoint-40")  # as where a signal has saved, and the run was gone on with


def test_a_run_that_has_ended_beyond_its_newest_checkpoint_is_not_trained_again(call, command_line, tmp_path):
    assert call("classify", left=BEHIND)[::2] == (0, True)  # where it is told that it has ended
    settings = RunConfig.parse("classify", [*command_line.argv, "--max_length=64"])
    assert "this run has finished (step 100, last loss 0.5)" in finished_message(settings, tmp_path / "out")
    code, line, ran = call("classify", "--learning_rate=0.5", left=BEHIND)
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "a run that has finished at step 100 (learning_rate: 0.5 now, " in line
    assert "increase max_steps or num_train_epochs to continue it, --resume " in line
    for more in ("--num_train_epochs=9", "--max_steps=200", "--overwrite_output_dir"):
        assert call("classify", "--learning_rate=0.5", more, left=BEHIND)[::2] == (0, True)


@pytest.mark.parametrize("changed", ["--learning_rate=0.5", "--max_steps=60", "--per_device_train_batch_size=3"])
def test_a_run_that_has_ended_at_its_newest_checkpoint_is_not_trained_again(call, changed):
    """Trainer would take one more step, and save what it is then."""
    left = (*BEHIND, "checkpoint-100")
    code, line, ran = call("classify", changed, left=left)
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert f"a run that has finished at step 100 ({changed[2:].partition('=')[0]}: " in line
    assert "increase max_steps or num_train_epochs to continue it" in line
    assert call("classify", changed, "--max_steps=200", left=left)[::2] == (0, True)


def test_a_run_does_not_go_on_from_beyond_its_last_step(call):
    left = ("checkpoint-40",)
    code, line, ran = call("classify", "--max_steps=30", left=left)
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "max_steps 30: " in line and "checkpoint-40 is of step 40, so nothing is left to train; increase" in line
    assert call("classify", "--max_steps=40", left=left)[::2] == (0, True)


@pytest.mark.parametrize("length", ["--max_steps=30", "--max_steps=60", "--max_steps=100", "--num_train_epochs=1"])
def test_a_shorter_run_does_not_replace_the_model_of_one_that_has_ended(call, length):
    code, line, ran = call("classify", length, left=BEHIND)
    assert (code, ran) == (2, False)
    assert "a run that has finished at step 100 (" in line


@pytest.mark.parametrize(
    ("saved", "now", "is_longer"),
    [
        ({"max_steps": 100}, ["--num_train_epochs=9"], False),  # which may be fewer steps
        ({"max_steps": 200}, ["--max_steps=200", "--learning_rate=0.5"], False),  # it ended early
        ({"max_steps": 100}, ["--max_steps=101"], True),
        ({"num_train_epochs": 2.0}, ["--num_train_epochs=3"], True),
    ],
)
def test_only_more_steps_or_epochs_make_a_run_longer(saved, now, is_longer):
    assert _is_longer(RunConfig.parse("classify", ["--output_dir=out", *now]), saved, 100) is is_longer


@pytest.mark.parametrize("left", [FINISHED, BEHIND])
@pytest.mark.parametrize(
    "other", ["--logging_steps=3", "--report_to=none", "--push_to_hub", "--dataloader_num_workers=2"]
)
def test_how_a_run_is_watched_and_uploaded_makes_it_no_other(call, command_line, tmp_path, left, other):
    assert call("classify", other, left=left)[::2] == (0, True)
    settings = RunConfig.parse("classify", [*command_line.argv, "--max_length=64", other])
    assert "this run has finished (step 100, last loss 0.5)" in finished_message(settings, tmp_path / "out")


def test_the_folder_may_be_given_in_other_words(call, command_line, tmp_path, monkeypatch):
    call("classify", left=BEHIND)
    monkeypatch.chdir(tmp_path)
    settings = RunConfig.parse("classify", [*command_line.argv, "--max_length=64", "--output_dir=out"])
    assert finished_message(settings, tmp_path / "out") is not None


def test_a_finished_run_says_so_and_is_left_as_it_is(tmp_path, tiny_model, csv_file):
    argv = ["classify", f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", "--output_dir=out"]
    argv += ["--max_steps=2", "--save_strategy=no", "--report_to=none", "--use_cpu", "--logging_steps=1"]
    ended = run_on_ranks(argv, tmp_path)
    assert [each.code for each in ended] == [0, 0], ended[0].err

    def state() -> dict:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "out").rglob("*")}

    (tmp_path / "out" / REPORT_NAME).unlink()  # the report says nothing of the run
    before = state()
    again = run_on_ranks(argv, tmp_path)
    assert [each.code for each in again] == [0, 0], again[0].err
    assert "out: this run has finished (step 2, last loss " in again[0].out
    assert "nothing is left to train; --overwrite_output_dir trains again and replaces it" in again[0].out
    assert again[1].out == ""
    other = run_on_ranks([*argv, "--max_steps=3"], tmp_path)
    assert [each.code for each in other] == [2, 2]
    assert "holds a model of another run (max_steps: 3 now, 2 there)" in other[0].err
    assert state() == before
    (tmp_path / "out" / "checkpoint-1").mkdir()  # it would be refused, if it were looked at
    again = run_on_ranks(argv, tmp_path)
    assert "out: this run has finished (step 2, last loss " in again[0].out
    (tmp_path / "out" / "checkpoint-1").rmdir()
    refused = run_on_ranks([*argv, "--resume=never"], tmp_path)
    assert [each.code for each in refused] == [2, 2] and "of an earlier run; give another" in refused[0].err
    anew = run_on_ranks([*argv, "--overwrite_output_dir"], tmp_path)
    assert [each.code for each in anew] == [0, 0] and state().keys() > before.keys()
    assert state() != before
