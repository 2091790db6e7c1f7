"""Tasks of TRL's trainers beside `dpo`: from a file to a model, on two ranks, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from hf_zero.errors import ConfigError, DataError
from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import logged, run_on_ranks


pytest.importorskip("trl")
pytest.importorskip("peft")

REWARDS = """
def short(completions, colour, **_):
    return [float(any(name in text for name in colour)) - len(text) / 100 for text in completions]

number = 3
"""
GENERATING = {"num_generations": 2, "max_completion_length": 6, "max_steps": 2}


def judged(count: int) -> list[dict]:
    rows = preferences(count)
    answers = (("chosen", True), ("rejected", False))
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": good} for row in rows for name, good in answers
    ]


def prompts(count: int) -> list[dict]:
    return [{"prompt": row["prompt"], "colour": row["chosen"].split()[0]} for row in preferences(count)]


def flags(task: str, model: Path, data: Path, **settings) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "train_file": data,
        "test_file": data,
        "output_dir": "out",
        "learning_rate": 3e-3,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        **({"max_length": 48} if task in ("reward", "kto") else {}),
        **settings,
    }
    return [task, *(f"--{name}={value}" for name, value in settings.items())]


CASES = [
    pytest.param("reward", preferences, {}, r"test rows: [\d.]+ of the chosen answers score higher", id="reward"),
    pytest.param("kto", judged, {}, r"test rows: loss [\d.]+", id="kto", marks=pytest.mark.full("slow")),
    pytest.param(
        "kto", preferences, {}, r"test rows: loss [\d.]+", id="kto-preferences", marks=pytest.mark.full("more cases")
    ),
    pytest.param(
        "grpo",
        prompts,
        {**GENERATING, "reward_funcs": "rewards.py:short", "beta": 0.1},
        r"test rows: the mean reward of a generated answer is -?[\d.]+",
        id="grpo",
    ),
    pytest.param(
        "rloo",
        prompts,
        {**GENERATING, "reward_funcs": "rewards.py:short"},
        r"test rows: the mean reward of a generated answer is -?[\d.]+",
        id="rloo",
        marks=pytest.mark.full("slow"),
    ),
    pytest.param(
        "distill",
        prompts,
        {"max_completion_length": 6, "max_steps": 2, "teacher_model_name_or_path": "MODEL"},
        r"test rows: loss -?[\d.]+",
        id="distill",
        marks=pytest.mark.full("slow"),
    ),
]


@pytest.mark.parametrize(("task", "rows", "settings", "line"), CASES)
def test_two_processes_train_and_leave_a_model(tiny_llama, tmp_path, task, rows, settings, line):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    data = write_rows(tmp_path / "rows.jsonl", rows(16))
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {name: tiny_llama if value == "MODEL" else value for name, value in settings.items()}
    first, second = run_on_ranks(flags(task, tiny_llama, data, zero_stage=3, **settings), tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert re.search(line, first.out) and second.out == ""
    assert len(logged(tmp_path / "out", "loss")) == settings.get("max_steps", 6)
    kind = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    _, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report


def test_a_reward_model_learns_what_is_preferred(tiny_llama, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", preferences(32))
    first, second = run_on_ranks(
        flags("reward", tiny_llama, data, max_steps=30, learning_rate=1e-2, zero_stage=2), tmp_path
    )
    assert (first.code, second.code) == (0, 0), first.err + second.err
    losses = logged(tmp_path / "out", "loss")
    assert losses[-1] < 0.5 * losses[0]


@pytest.fixture
def load(tiny_llama, tmp_path, monkeypatch):
    """Reads rows as a run would, before it loads the model."""

    def call(task: str, rows: list, **settings):
        from hf_zero.recipes.settings import parse_settings
        from hf_zero.recipes.tasks import TASKS
        from tests.trainer.harness import reset_accelerate

        monkeypatch.chdir(tmp_path)
        Path("rewards.py").write_text(REWARDS)
        reset_accelerate()
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        settings = {name: tiny_llama if value == "MODEL" else value for name, value in settings.items()}
        settings = parse_settings(task, flags(task, tiny_llama, Path("rows.jsonl"), **settings)[1:])
        module = TASKS[task].load()
        module.check(settings.arguments, settings.training)
        return module.load_data(settings.arguments, settings.training_arguments())

    return call


REWARDED = {**GENERATING, "reward_funcs": "rewards.py:short", "beta": 0.1}


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("kto", [*judged(1), {"prompt": "a", "completion": "b", "label": 1}], "line 3: column 'label' holds 1"),
        ("kto", [{"prompt": "a"}], "expected prompt and completion and label, or chosen and rejected"),
        ("grpo", [*prompts(1), {"prompt": "", "colour": "red"}], "line 2: nothing in column 'prompt'"),
        ("grpo", [*prompts(1), {"prompt": "a", "colour": 3}], "line 2: column 'colour' holds a int"),
        ("grpo", [{"text": "a"}], "column expected 'prompt'"),
        ("reward", [{"chosen": "a"}], "column expected 'rejected'"),
    ],
)
def test_rows_that_a_task_cannot_take_are_named(load, task, rows, message):
    with pytest.raises(DataError, match=message):
        load(task, rows, **(REWARDED if task == "grpo" else {}))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("grpo", {}, "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function"),
        ("grpo", {"reward_funcs": "nice"}, "reward_funcs 'nice': expected one of accuracy_reward"),
        ("grpo", {"reward_funcs": "none.py:short"}, "reward_funcs none.py:short: there is no file none.py"),
        ("grpo", {"reward_funcs": "rewards.py:nothing"}, "rewards.py has no function 'nothing'"),
        ("grpo", {**REWARDED, "model_revision": "v1"}, "model_revision v1: TRL loads the reference model by its name"),
        (
            "grpo",
            {**REWARDED, "max_completion_length": 64},
            "max_completion_length 64: .* has 64 positions",
        ),
        ("grpo", {"reward_model_name_or_path": "./none"}, "reward_model_name_or_path"),
        ("grpo", {"reward_model_name_or_path": "MODEL"}, "is a LlamaForCausalLM, which gives no score"),
        ("distill", {}, "teacher_model_name_or_path: is missing"),
        ("grpo", {**REWARDED, "dataset_streaming": True, "max_steps": 3}, "dataset_streaming: prompts are drawn"),
        ("reward", {"label_smoothing_factor": 0.1}, "label_smoothing_factor: has no effect; leave it out"),
    ],
)
def test_settings_that_a_task_cannot_take_are_refused(load, task, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(task, prompts(2), **settings)


def test_prompts_keep_their_other_columns_for_the_rewards(load):
    data = load("grpo", prompts(3), **REWARDED)
    assert list(data.train) == prompts(3)


@pytest.mark.parametrize(("task", "rows", "settings", "line"), CASES)
def test_a_dry_run_tells_the_memory(tiny_llama, tmp_path, task, rows, settings, line, monkeypatch, capsys):
    from hf_zero.recipes.cli import main
    from tests.trainer.harness import reset_accelerate

    monkeypatch.chdir(tmp_path)
    reset_accelerate()
    data = write_rows(tmp_path / "rows.jsonl", rows(8))
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {name: tiny_llama if value == "MODEL" else value for name, value in settings.items()}
    assert main([*flags(task, tiny_llama, data, zero_stage=3, **settings), "--dry_run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert re.search(r"a micro-batch: \d+ rows x \d+ tokens", told) and "memory of each rank" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "values", [[1, 0.5], [None, "red"], [[], ["red"]], [{"x": 1}, {"x": 1, "y": 2}], [None, None]], ids=str
)
def test_columns_that_only_later_rows_tell_are_kept(load, values):
    rows = [{"prompt": "the door is", "told": value} for value in values]
    found = [row["told"] for row in load("grpo", rows, **REWARDED).train]
    assert found[1] == values[1] and len(found) == 2


def test_a_file_of_rewards_is_a_module_of_its_own(tmp_path):
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    (tmp_path / "words.py").write_text("LONG = 3\n")
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom words import LONG\ncalls = []\n"
    )
    code += "@dataclass\nclass Place:\n    at: int\n"
    code += "def one(completions, **_):\n    calls.append(1)\n    return [float(LONG)]\n"
    code += "def two(completions, **_):\n    return [float(len(calls))]\nnumber = 3\n"
    (tmp_path / "judges.py").write_text(code)
    one, two = rewards_of(RewardedArguments(reward_funcs=[f"{tmp_path}/judges.py:{name}" for name in ("one", "two")]))
    assert one(completions=["a"]) == [3.0] and two(completions=["a"]) == [1.0]
    with pytest.raises(ConfigError, match="'number' is no function there"):
        rewards_of(RewardedArguments(reward_funcs=[f"{tmp_path}/judges.py:number"]))


def test_a_reward_that_fails_in_training_is_told_by_file_and_line(tmp_path):
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    code = "def score(text):\n    return 1 / (len(text) - 1)\n"
    code += "def fails(completions, **_):\n    return [score(each) for each in completions]\n"
    code += "def short(completions, **_):\n    return [1.0]\ndef text(completions, **_):\n    return ['good', None]\n"
    (tmp_path / "judges.py").write_text(code)
    names = [f"{tmp_path}/judges.py:{name}" for name in ("fails", "short", "text")]
    fails, short, text = rewards_of(RewardedArguments(reward_funcs=names))
    assert fails.__name__ == "fails" and fails(completions=["abc"]) == [0.5]
    with pytest.raises(ConfigError, match=r"judges.py, line 2: ZeroDivisionError: division by zero\); correct it"):
        fails(completions=["a"])
    with pytest.raises(ConfigError, match="judges.py:short: gave 1 numbers for 2 completions"):
        short(completions=["a", "b"])
    with pytest.raises(ConfigError, match="judges.py: ValueError: could not convert"):
        text(completions=["a", "b"])


def test_rows_that_are_left_out_are_counted(tiny_llama, load):
    from hf_zero.recipes.settings import parse_settings
    from hf_zero.recipes.tasks import TASKS

    long = {"prompt": "the door is", "chosen": " red" * 60, "rejected": " a door"}
    for task, rows in (
        ("reward", [*preferences(3), long]),
        ("kto", [*preferences(3), {**long, "prompt": "red" * 60}]),
    ):
        data, said = load(task, rows), []
        settings = parse_settings(task, flags(task, tiny_llama, Path("rows.jsonl"))[1:])
        training, module = settings.training_arguments(), TASKS[task].load()
        model = module.load_model(settings.arguments, training, data)
        module.before(module.make_trainer(model, settings.arguments, training, data), data, said.append)
        assert len(said) == 1 and "left out" in said[0], task


@pytest.mark.parametrize(("flags", "wanted"), [([], False), (["--bf16=True"], True), (["--use_cpu=True"], False)])
def test_the_device_decides_the_precision_that_trl_leaves_open(flags, wanted, monkeypatch):
    import torch

    from hf_zero.recipes.settings import parse_settings

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: "--use_cpu=True" in flags)
    assert parse_settings("dpo", flags).training["bf16"] is wanted
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert parse_settings("dpo", ["--fp16=True"]).training["bf16"] is False
    assert parse_settings("dpo", []).training["bf16"] is True
