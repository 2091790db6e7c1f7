"""Preferences, from a file to a model that has learned them."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes import run
from hf_zero.recipes.plan_input import PlanInput
from hf_zero.recipes.run_config import RunConfig
from tests.distributed import run_ranks
from tests.planner import subjects
from tests.recipes.preferences import ANSWERS, as_chats, preferences, write_rows
from tests.recipes.ranks import logged, run_on_ranks
from tests.tensor_meter import TensorMeter


pytest.importorskip("trl")
pytest.importorskip("peft")

PEAK = re.compile(r"at the peak on the device +([\d.]+) MiB")


def flags(model: Path, data: Path, **settings) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "train_file": data,
        "output_dir": "out",
        "max_length": 48,
        "learning_rate": 3e-3,
        "beta": 0.5,
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        **settings,
    }
    return ["dpo", *(f"--{name}={value}" for name, value in settings.items())]


def test_two_processes_learn_what_to_prefer_and_leave_a_model_that_generates(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train = write_rows(tmp_path / "train.jsonl", preferences(64))
    test = write_rows(tmp_path / "test.jsonl", preferences(16, seed=1))
    first, second = run_on_ranks(flags(tiny_llama, train, test_file=test, zero_stage=3), tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    losses, margins = (logged(tmp_path / "out", name) for name in ("loss", "rewards/margins"))
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model itself: log 2
    assert losses[-1] < 0.4 and margins[-1] > margins[0] + 0.5
    assert second.out == ""
    accuracy = float(re.search(r"test rows: ([\d.]+) of the chosen answers are preferred", first.out).group(1))
    assert accuracy > 0.9
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = model.generate(**tokenizer("the door is", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("the door is")


@pytest.mark.full("slow")
def test_an_adapter_learns_from_chats_and_is_its_own_reference(tiny_llama, tmp_path):
    data = write_rows(tmp_path / "train.jsonl", as_chats(preferences(64)))
    settings = {"use_peft": True, "lora_r": 4, "learning_rate": 3e-2, "beta": 1.0, "zero_stage": 2}
    first, _ = run_on_ranks(flags(tiny_llama, data, **settings), tmp_path)
    assert first.code == 0, first.err
    losses = logged(tmp_path / "out", "loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.6
    assert "chat template: our default" in first.out
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "out" / "ref").exists()


class _Marks(TrainerCallback):
    """Marks the steps of a training."""

    def __init__(self, meter: TensorMeter):
        self._meter = meter

    def on_step_begin(self, args, state, control, **_):
        self._meter.mark(f"step-{state.global_step}")


def _measured(argv: list[str]) -> tuple[int, float]:
    """The bytes at the peak of a third step, and what a dry run says of it, in MiB."""
    settings = RunConfig.parse("dpo", argv)
    with TensorMeter() as meter:
        with run._prepared(settings, {}) as prepared:
            trainer = prepared.trainer
            told = "\n".join(run.predicted(trainer, replace(settings, num_processes=2)))
            meter.mark("begin")
            trainer.add_callback(_Marks(meter))
            trainer.train()
            meter.mark("end")
    return meter.span("step-2", "end").peak_nbytes, float(PEAK.search(told)[1])


def test_the_peak_of_a_step_with_a_reference_is_the_planned_one(tiny_llama, tmp_path):
    subjects.build("llama").save_pretrained(tmp_path / "model")
    for path in tiny_llama.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    rows = [{"prompt": "the door is", "chosen": " red" * 60, "rejected": " a door" * 60}] * 24
    settings = {"zero_stage": 3, "max_steps": 3, "per_device_train_batch_size": 4, "zero_shared_memory": False}
    argv = flags(tmp_path / "model", write_rows(tmp_path / "train.jsonl", rows), use_cpu=True, **settings)[1:]
    settings = RunConfig.parse("dpo", [*argv, "--num_processes=2"])
    planned = PlanInput.of(settings.kind, settings)
    alone = replace(planned, forwards=("trained",))
    told, without = (run.predict().peak_nbytes for run in (planned, alone))
    assert planned.forwards == ("trained", "reference") and without < 0.95 * told
    for measured, said in run_ranks(_measured, 2, argv):
        assert told == pytest.approx(measured, rel=0.03) and said == pytest.approx(told / 2**20, abs=0.01)


@pytest.fixture
def load(tiny_llama, tmp_path):
    """Reads rows as a run would, before it loads the model."""

    def call(rows: list, **settings):
        from hf_zero.recipes.run_config import RunConfig
        from hf_zero.recipes.tasks import TASKS
        from tests.trainer.harness import reset_accelerate

        reset_accelerate()
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        parsed = RunConfig.parse("dpo", flags(tiny_llama, tmp_path / "rows.jsonl", **settings)[1:])
        dpo = TASKS["dpo"].load()
        dpo.check(parsed.arguments, parsed.training)
        return dpo.load_data(parsed.arguments, parsed.training_arguments())

    return call


GOOD = {"prompt": "the door is", "chosen": " red", "rejected": " a door"}
CHAT = as_chats([GOOD])[0]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({**GOOD, "chosen": ""}, "line 2: nothing in column 'chosen'"),
        ({"prompt": "the", "chosen": "red"}, "line 2: nothing in column 'rejected'"),
        ({**GOOD, "rejected": {"a": 1}}, "line 2: column 'rejected' holds a dict, expected a text"),
        ({**GOOD, "rejected": [{"role": "assistant", "content": "x"}]}, "line 2: column 'rejected' holds a list"),
        ("{", "line 2: not JSON"),
    ],
)
def test_a_bad_row_of_texts_is_named(load, bad, message):
    with pytest.raises(DataError, match=message) as caught:
        load([GOOD, bad])
    assert "rows.jsonl: line 2" in str(caught.value) and "--skip_bad_rows" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({**CHAT, "chosen": "red"}, "column 'chosen' holds a str, expected a list of messages"),
        ({**CHAT, "chosen": [{"role": "assistant"}]}, "message 1 of column 'chosen' has no content"),
        ({**CHAT, "tools": [{"name": "search"}]}, "column 'tools' holds tools, which are not supported"),
        ({**CHAT, "prompt": []}, "nothing in column 'prompt'"),
    ],
)
def test_a_bad_row_of_chats_is_named(load, bad, message):
    with pytest.raises(DataError, match=f"rows.jsonl: line 2: {message}"):
        load([CHAT, bad])


def test_bad_rows_are_left_out_and_counted(load):
    data = load([GOOD, "{", {**GOOD, "prompt": None}, GOOD], skip_bad_rows=True)
    assert list(data.train) == [GOOD, GOOD]
    assert data.notes == ["train: 2 rows", "train: 2 bad rows left out"]


def test_a_column_that_is_missing_is_named_with_those_there_are(load):
    with pytest.raises(DataError, match=r"columns found \['prompt', 'completion'\], column expected 'chosen'"):
        load([{"prompt": "x", "completion": "y"}])


def test_a_prompt_that_is_not_given_is_found_as_trl_finds_it(load):
    from trl.data_utils import extract_prompt

    implicit = {"chosen": "the door is red and old", "rejected": "the door is round"}
    assert list(load([implicit]).train) == [extract_prompt(implicit)]
    chats = {name: CHAT["prompt"] + CHAT[name] for name in ANSWERS}
    assert list(load([chats]).train) == [extract_prompt(chats) | {"chat_template_kwargs": {}}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "yes", "rejected": "no"}, "begin differently, and there is no column 'prompt'"),
        ({"chosen": "the same", "rejected": "the same"}, "is what the other begins with"),
    ],
)
def test_rows_without_any_prompt_are_refused(load, row, message):
    with pytest.raises(DataError, match=message):
        load([row])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_init_kwargs": '{"dtype": "auto"}'}, "model_init_kwargs: has no effect"),
        ({"dataset_streaming": True, "max_steps": -1}, "set --max_steps"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: has no effect; give label_smoothing"),
        ({"dtype": "fp8"}, "dtype: invalid choice: 'fp8'"),
        ({"chat_template_path": "nowhere.jinja"}, "chat_template_path nowhere.jinja: cannot be read"),
        ({"chat_template_path": "default"}, "chat_template_path: rows of .*rows.jsonl hold no messages; leave it out"),
    ],
)
def test_settings_that_cannot_work_are_refused(load, settings, message):
    with pytest.raises(ConfigError, match=message):
        load([GOOD], **settings)


def test_the_settings_keep_the_template_that_the_next_run_is_compared_with(tiny_llama, tmp_path):
    from hf_zero.recipes.run_config import RunConfig
    from hf_zero.recipes.tasks import TASKS
    from tests.trainer.harness import reset_accelerate

    reset_accelerate()
    data = write_rows(tmp_path / "rows.jsonl", as_chats([GOOD]))
    parsed = RunConfig.parse("dpo", flags(tiny_llama, data, chat_template_path="default")[1:])
    TASKS["dpo"].load().load_data(parsed.arguments, parsed.training_arguments())
    assert parsed.values()["chat_template_path"] == "default"


def test_a_stream_without_a_good_row_is_refused(load):
    with pytest.raises(DataError, match="rows.jsonl: no good row, expected one at least"):
        load([{**GOOD, "chosen": ""}], dataset_streaming=True, skip_bad_rows=True)


def test_max_length_is_a_key_of_trl_alone(load):
    from hf_zero.recipes.run_config import RunConfig

    settings = RunConfig.parse("dpo", ["--max_length", "77"])
    assert settings.training["max_length"] == 77
    assert not hasattr(settings.arguments, "max_length")


@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_without_trl_one_line_says_what_to_install(task, monkeypatch, capsys):
    import hf_zero.trl
    from hf_zero.recipes.cli import main

    monkeypatch.setitem(sys.modules, "trl", None)
    for name in ("trl.trainers", "trl.mixin", "recipes.trl_task", "recipes.trl_tasks", "recipes.sft"):
        monkeypatch.delitem(sys.modules, f"hf_zero.{name}", raising=False)
    for name in hf_zero.trl.__all__:
        monkeypatch.delitem(vars(hf_zero.trl), name, raising=False)
    assert main([task, "--help"]) == 2
    assert re.fullmatch(r"hf-zero: TRL cannot be imported .*; pip install 'hf-zero\[trl\]'\n", capsys.readouterr().err)
    assert main(["--help"]) == 0
    assert "  dpo " in capsys.readouterr().out
