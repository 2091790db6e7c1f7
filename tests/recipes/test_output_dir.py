"""What `output_dir` holds decides whether a run starts, goes on, has finished, or is refused; no model and no
checkpoint is lost unasked. `resolved.yaml` keeps the configuration, and no secret."""

import json
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_zero.accelerator.environment import LAUNCHER_VARIABLES
from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.cli import main
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.data.sources import load_rows
from hf_zero.recipes.output_dir import (
    RESOLVED_NAME,
    RUN_NAME,
    check_rows,
    check_unchanged,
    checkpoint_of,
    finished_message,
    record_start,
    remove_checkpoints,
    resolved_text,
    resume_message,
)
from hf_zero.recipes.report import REPORT_NAME
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS, SourceArguments
from hf_zero.trainer import resumable
from tests.recipes.ranks import run_on_ranks


# Flags of tasks whose rows have no largest length.
GENERATING = ["--max_completion_length=16"]
FLAGS = {
    "grpo": [*GENERATING, "--reward_funcs=think_format_reward"],
    "rloo": [*GENERATING, "--reward_funcs=think_format_reward"],
    "distill": [*GENERATING, "--teacher_{model}"],
}
# What runs leave
FINISHED = (RESOLVED_NAME, RUN_NAME, "model.safetensors")
BEHIND = (*FINISHED, "checkpoint-40")  # as where a signal has saved, and the run was gone on with
AT_END = (*BEHIND, "checkpoint-100")
STOPPED = (RESOLVED_NAME, "checkpoint-3")


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


def message_in(tmp_path, command_line, *more: str) -> str | None:
    config = RunConfig.parse("classify", [*command_line.argv, "--max_length=64", *more])
    return finished_message(config, tmp_path / "out")


OTHER, ENDED = r"holds a model of another run \(", r"a run that has finished at step 100 \("
CHANGED = "go on with the same, or give another output_dir or --overwrite_output_dir$"


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize(
    ("left", "flags", "message"),
    [
        # a model of another run
        (["model-00001-of-00002.safetensors"], [], f"{OTHER}there is no {RESOLVED_NAME}"),
        (["adapter_model.safetensors", RESOLVED_NAME], [], f"{OTHER}it has not finished"),
        (["pytorch_model.bin", RUN_NAME], [], f"{OTHER}there is no {RESOLVED_NAME}"),
        (FINISHED, ["--resume=never"], "of an earlier run; give another output_dir, or --overwrite_output_dir"),
        # a finished run, which Trainer would train one step more
        *(
            (left, ["--learning_rate=0.5"], f"{ENDED}learning_rate: 0.5 now, .*increase max_steps or num_train_epochs")
            for left in (BEHIND, AT_END)
        ),
        (AT_END, ["--per_device_train_batch_size=3"], f"{ENDED}per_device_train_batch_size: 3 now"),
        *((BEHIND, [f"--max_steps={steps}"], f"{ENDED}max_steps: .*--resume ") for steps in (30, 60, 100)),
        (AT_END, ["--max_steps=60"], f"{ENDED}max_steps: "),
        (BEHIND, ["--num_train_epochs=1"], f"{ENDED}num_train_epochs: "),
        (BEHIND, ["--max_steps=90", "--num_train_epochs=9"], f"{ENDED}(max_steps|num_train_epochs): "),
        # checkpoints
        (
            ["checkpoint-40"],
            ["--max_steps=30"],
            "^max_steps 30: .*-40 is of step 40, so nothing is left to train; ",
        ),
        (STOPPED, ["--max_length=32"], f"^max_length: 32 now, 64 in the run that .*{CHANGED}"),
        (STOPPED, ["--seed=7"], f"^seed: 7 now, 42 in the run that .*{CHANGED}"),
        (STOPPED, ["--max_train_rows=50"], f"^max_train_rows: 50 now, None in the run that .*{CHANGED}"),
        (STOPPED, ["--resume=nowhere"], "nowhere': no such folder; give auto, never or a checkpoint's folder"),
    ],
)
def test_a_run_that_would_lose_or_repeat_something_is_refused(call, left, flags, message):
    code, line, ran = call("classify", *flags, left=left)
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert re.search(message, line.removeprefix("hf-zero: ").rstrip()), line
    if "--resume" not in " ".join(flags) and "checkpoint-40" != left[0]:
        assert call("classify", *flags, "--overwrite_output_dir", left=left)[::2] == (0, True)


@pytest.mark.parametrize(
    ("left", "flags"),
    [
        *((left, ["--learning_rate=0.5"]) for left in ([], [RESOLVED_NAME, RUN_NAME], ["notes.txt"], STOPPED)),
        *((STOPPED, [flag]) for flag in ("--max_steps=9", "--num_train_epochs=9", "--zero_stage=1")),
        *((left, ["--learning_rate=0.5", "--max_steps=200"]) for left in (BEHIND, AT_END)),
        (BEHIND, ["--learning_rate=0.5", "--num_train_epochs=9"]),
        (["checkpoint-40"], ["--max_steps=40"]),
    ],
)
def test_a_run_starts_or_goes_on(call, left, flags):
    assert call("classify", *flags, left=left)[::2] == (0, True)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_another_run_is_not_overwritten_by_any_task(call, task):
    code, line, ran = call(task, "--learning_rate=0.5")
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "holds a model of another run (learning_rate: 0.5 now, " in line
    assert line.rstrip().endswith("give another output_dir, or --overwrite_output_dir, which replaces it")
    assert call(task, "--learning_rate=0.5", "--overwrite_output_dir")[::2] == (0, True)


@pytest.mark.parametrize("left", [FINISHED, BEHIND])
@pytest.mark.parametrize(
    "other", ["--logging_steps=3", "--report_to=none", "--push_to_hub", "--dataloader_num_workers=2"]
)
def test_how_a_run_is_watched_and_uploaded_makes_it_no_other(call, command_line, tmp_path, left, other, monkeypatch):
    assert call("classify", other, left=left)[::2] == (0, True)  # where it is told that it has ended
    assert "this run has finished (step 100, last loss 0.5)" in message_in(tmp_path, command_line, other)
    monkeypatch.chdir(tmp_path)
    assert message_in(tmp_path, command_line, "--output_dir=out") is not None


def test_a_checkpoint_of_elsewhere_does_not_write_over_another_model_either(call, tmp_path, monkeypatch):
    code, line, ran = call("classify", f"--resume={tmp_path / 'out' / 'checkpoint-3'}", left=STOPPED)
    assert (code, ran, line.count("\n")) == (1, False, 1) and "checkpoint-3" in line  # it is not complete
    monkeypatch.setattr("hf_zero.recipes.output_dir.check_resumable", lambda *_, **__: None)
    (tmp_path / "b" / "checkpoint-3").mkdir(parents=True)
    code, line, ran = call("classify", "--learning_rate=0.5", f"--resume={tmp_path / 'b' / 'checkpoint-3'}")
    assert (code, ran) == (2, False) and "holds a model of another run" in line


def test_the_model_that_a_run_starts_from_is_replaced_only_if_that_is_asked_for_and_not_removed(
    call, command_line, tmp_path, tiny_model
):
    argv = ["classify", f"--model_name_or_path={tmp_path / 'b'}", f"--output_dir={tmp_path / 'b'}"]
    shutil.copytree(tiny_model, tmp_path / "b")
    assert "holds a model of another run" in call(*argv)[1]
    assert "holds model.safetensors of an earlier run; give another output_dir, or" in call(*argv, "--resume=never")[1]
    assert call(*argv, "--overwrite_output_dir")[::2] == (0, True)
    checkpoint = shutil.copytree(tiny_model, tmp_path / "c" / "checkpoint-3")
    argv = ["classify", f"--model_name_or_path={checkpoint}", f"--output_dir={tmp_path / 'c'}"]
    code, line, ran = command_line(*argv, "--overwrite_output_dir")
    assert (code, ran, line.count("\n")) == (2, False, 1)
    assert "is among the checkpoints that --overwrite_output_dir removes; give another output_dir" in line
    assert command_line(*argv[:2], "--resume=never", f"--output_dir={tmp_path / 'd'}")[::2] == (0, True)


@pytest.mark.parametrize("content", ["a: [", "- 1\n"])
def test_a_configuration_that_cannot_be_read_is_told(call, command_line, tmp_path, content):
    call("classify", left=STOPPED)
    (tmp_path / "out" / RESOLVED_NAME).write_text(content, encoding="utf-8")
    code, line, ran = command_line("classify", "--max_length=64")
    assert (code, ran, line.count("\n")) == (2, False, 1) and "--overwrite_output_dir starts over" in line


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        *(("sft", [flag], None) for flag in ("--dataset_num_proc=2", "--skip_bad_rows", "--attn_implementation=sdpa")),
        ("sft", ["--test_file=rows.jsonl", "--max_test_rows=3"], None),
        ("classify", ["--test_file=rows.csv"], "^test_file: 'rows.csv' now, None in the run"),  # a fifth was held out
        ("classify", ["--max_test_rows=3"], None),
        ("classify with test rows", ["--test_file=rows.csv", "--max_test_rows=3"], None),
        ("classify with test rows", ["--dataset_test_split=test"], None),
        ("classify with test rows", [], "^test_file: None now, 'other.csv' in the run"),
        ("dpo", ["--max_length=64"], "^max_length: .* now, .* in the run that"),
        ("dpo", ["--loss_type=ipo"], "^loss_type: .* now, .* in the run that"),
        ("dpo", ["--beta=0.5"], "^beta: .* now, .* in the run that"),
        ("task", [], "^task: 'sft' now, 'classify' in the run that"),
    ],
)
def test_what_teaches_may_not_change_and_how_it_is_computed_may(tmp_path, task, changed, message):
    task, with_test_rows, _ = task.partition(" with test rows")
    before, now = ("classify", "sft") if task == "task" else (task, task)
    own = ["--test_file=other.csv"] if with_test_rows else []
    text = resolved_text(RunConfig.parse(before, [f"--output_dir={tmp_path}", *own]))
    (tmp_path / RESOLVED_NAME).write_text(text, encoding="utf-8")
    config = RunConfig.parse(now, [f"--output_dir={tmp_path}", *changed])
    if message is None:
        check_unchanged(config, tmp_path)
        return
    with pytest.raises(ConfigError, match=message):
        check_unchanged(config, tmp_path)


def test_the_decisive_arguments_of_tasks_exist():
    for name, task in TASKS.items():
        assert set(getattr(task.load(), "decisive", ())) <= set(RunConfig.parse(name, []).training)


# Records


def trainer_in(folder) -> SimpleNamespace:
    shard = lambda _: SimpleNamespace(comm=Comm(torch.device("cpu"), 60.0))  # noqa: E731
    return SimpleNamespace(
        accelerator=SimpleNamespace(shard=shard), model=None, args=SimpleNamespace(output_dir=folder)
    )


def test_a_run_that_replaces_another_removes_its_checkpoints_and_nothing_else(tmp_path):
    kept = {"notes.txt", "model.safetensors", "checkpoint-best", RESOLVED_NAME}
    for name in kept:
        (tmp_path / name).mkdir() if name.startswith("checkpoint") else (tmp_path / name).touch()
    (tmp_path / "checkpoint-5").mkdir()
    remove_checkpoints(trainer_in(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("streaming", [False, True])
def test_other_rows_or_another_order_are_refused(tmp_path, streaming):
    lines = [f'{{"text": "row {number}"}}\n' for number in range(2500)]
    config = RunConfig.parse("sft", [f"--output_dir={tmp_path}"])

    def data_of(lines) -> Data:
        (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        arguments = SourceArguments(train_file=str(tmp_path / "rows.jsonl"), dataset_streaming=streaming)
        return Data(None, None, None, "rows.jsonl", rows=[load_rows(arguments, "train")])

    found = data_of(lines).rows_summary()
    start = "a stream" if streaming else "2,500 rows"
    assert found.startswith(f"{start}, ")
    (tmp_path / RESOLVED_NAME).write_text(resolved_text(config), encoding="utf-8")
    check_rows(data_of(lines), tmp_path)  # of a run that did not note them
    record_start(trainer_in(tmp_path), config, found)
    check_rows(data_of(lines), tmp_path)
    others = [[*lines, '{"text": "more"}\n'], lines[:-1], [*lines[1:], lines[0]]]
    for other in others[2:] if streaming else others:  # the end of a stream is not known
        with pytest.raises(ConfigError, match=f"^rows.jsonl: .* now, {start}, .* in the run that .*; give"):
            check_rows(data_of(other), tmp_path)


def test_the_line_of_a_run_that_goes_on_says_how_far_it_is_and_names_a_changed_norm_to_clip_to(tmp_path):
    once = RunConfig.parse("sft", [f"--output_dir={tmp_path}"])
    (tmp_path / RESOLVED_NAME).write_text(resolved_text(once), encoding="utf-8")
    checkpoint = tmp_path / "checkpoint-6"
    checkpoint.mkdir()
    state = {"global_step": 6, "max_steps": 6, "epoch": 3.0}  # of the run that has ended
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    again = RunConfig.parse("sft", [f"--output_dir={tmp_path}", "--max_grad_norm=0.5"])
    for config, max_steps, place in (
        (once, 12, "step 6 of 12"),
        (once, -1, "step 6, epoch 3 of 5"),
        (again, 12, "step 6 of 12, with max_grad_norm 0.5 as given (it was 1.0)"),
    ):
        training = SimpleNamespace(max_steps=max_steps, num_train_epochs=5.0)
        expected = f"resume: going on from {checkpoint}, {place}; "
        assert resume_message(str(checkpoint), config, training).startswith(expected)


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


def test_the_longer_name_of_trainer_says_the_same():
    assert RunConfig.parse("classify", ["--resume_from_checkpoint", "out/checkpoint-7"]).resume == "out/checkpoint-7"
    assert RunConfig.parse("classify", ["--resume_from_checkpoint", "True"]).resume == "auto"
    with pytest.raises(ConfigError, match="give one of them"):
        RunConfig.parse("classify", ["--resume_from_checkpoint", "a", "--resume", "b"])


def test_keyword_arguments_are_those_of_a_run_that_kept_them_as_text():
    kwargs = {"lr_scheduler_kwargs": '{"num_cycles": "2"}', "gradient_checkpointing_kwargs": '{"use_reentrant": "no"}'}
    config = RunConfig.parse("classify", [f"--{name}={text}" for name, text in kwargs.items()])
    assert config.training["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert config.training["gradient_checkpointing_kwargs"] == {"use_reentrant": "no"}
    saved = {**config.values(), "lr_scheduler_kwargs": '{"num_cycles": 2}'}
    assert config.diff(saved) is None
    assert config.diff({**saved, "lr_scheduler_kwargs": '{"num_cycles": 3}'})[0] == "lr_scheduler_kwargs"


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


def test_the_command_in_the_resolved_configuration_finds_it_and_starts_anew():
    config = RunConfig.parse("classify", ["--output_dir", "out/my run"])
    command = resolved_text(config).splitlines()[0].partition(": ")[2]
    assert shlex.split(command)[-4:] == ["--config", "out/my run/resolved.yaml", "--output_dir", "out/my run-again"]


# Whole runs


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
    anew = run_on_ranks([*argv, "--overwrite_output_dir"], tmp_path)
    assert [each.code for each in anew] == [0, 0] and state().keys() > before.keys()
    assert state() != before


def test_a_dry_run_tells_all_and_writes_nothing(tiny_model, csv_file, tmp_path, monkeypatch, capsys):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    argv = [f"--model_name_or_path={folder}", f"--train_file={csv_file}", "--output_dir=out"]
    assert main(["classify", *argv, "--num_processes=2", "--use_cpu", "--zero_stage=2", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert re.search(r"^  zero_stage: 2$", said, re.MULTILINE) and "learning_rate" not in said
    assert "'the soup was cold and the waiter was cold' -> food" in said
    assert "  6,130 parameters, 6,130 of them trained" in said
    assert "a micro-batch: 8 rows x 64 tokens" in said  # what the model takes, though max_length is more
    assert re.search(r"optimizer state +float32 +0.02 MiB  sharded over 2 ranks", said)
    for name, value in zip(LAUNCHER_VARIABLES, ("1", "2", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["classify", *argv, "--dry_run"]) == 2
    assert "the launcher has started 2; leave the launcher out" in capsys.readouterr().err
