"""Tasks of TRL's trainers beside `dpo`: what they learn, what their dry runs tell, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_zero.errors import ConfigError, DataError
from tests.recipes.cases import CASES, JUDGED, REWARDS, flags, judged, prompts
from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import logged, run_on_ranks
from tests.tiers import in_core


pytest.importorskip("trl")
pytest.importorskip("peft")


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
        from hf_zero.recipes.run_config import RunConfig
        from hf_zero.recipes.tasks import TASKS
        from tests.trainer.harness import reset_accelerate

        monkeypatch.chdir(tmp_path)
        Path("rewards.py").write_text(REWARDS)
        reset_accelerate()
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        settings = {name: tiny_llama if value == "MODEL" else value for name, value in settings.items()}
        settings = RunConfig.parse(task, flags(task, tiny_llama, Path("rows.jsonl"), **settings)[1:])
        module = TASKS[task].load()
        module.check(settings.arguments, settings.training)
        return module.load_data(settings.arguments, settings.training_arguments())

    return call


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("kto", [*judged(1), {"prompt": "a", "completion": "b", "label": 1}], "line 3: column 'label' holds 1"),
        ("kto", [{"prompt": "a"}], "expected prompt and completion and label, or chosen and rejected"),
        ("grpo", [*prompts(1), {"prompt": "", "colour": "red"}], "line 2: nothing in column 'prompt'"),
        ("grpo", [{"text": "a"}], "column expected 'prompt'"),
        ("reward", [{"chosen": "a"}], "column expected 'rejected'"),
    ],
)
def test_rows_that_a_task_cannot_take_are_named(load, task, rows, message):
    with pytest.raises(DataError, match=message):
        load(task, rows, **(JUDGED if task == "grpo" else {}))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("grpo", {}, "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function"),
        ("grpo", {"reward_funcs": "nice"}, "reward_funcs 'nice': expected one of accuracy_reward"),
        ("grpo", {"reward_funcs": "none.py:short"}, "reward_funcs none.py:short: there is no file none.py"),
        ("grpo", {"reward_funcs": "rewards.py:nothing"}, "rewards.py has no function 'nothing'"),
        ("grpo", {**JUDGED, "model_revision": "v1"}, "model_revision v1: TRL loads the reference model by its name"),
        (
            "grpo",
            {**JUDGED, "max_completion_length": 64},
            "max_completion_length 64: .* has 64 positions",
        ),
        ("grpo", {"reward_model_name_or_path": "./none"}, "reward_model_name_or_path"),
        ("grpo", {"reward_model_name_or_path": "MODEL"}, "is a LlamaForCausalLM, which gives no score"),
        ("distill", {}, "teacher_model_name_or_path: is missing"),
        ("grpo", {**JUDGED, "dataset_streaming": True, "max_steps": 3}, "dataset_streaming: prompts are drawn"),
        ("reward", {"label_smoothing_factor": 0.1}, "label_smoothing_factor: has no effect; leave it out"),
    ],
)
def test_settings_that_a_task_cannot_take_are_refused(load, task, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(task, prompts(2), **settings)


def test_prompts_keep_their_other_columns_for_the_rewards(load):
    data = load("grpo", prompts(3), **JUDGED)
    assert list(data.train) == prompts(3)


@pytest.mark.parametrize("name", in_core(["reward", "grpo"], [name for name in CASES if name != "classify"]))
def test_a_dry_run_tells_the_memory(tiny_llama, tmp_path, name, monkeypatch, capsys):
    from hf_zero.recipes.cli import main
    from tests.trainer.harness import reset_accelerate

    monkeypatch.chdir(tmp_path)
    reset_accelerate()
    argv = CASES[name].flags(tiny_llama, tmp_path, 8, zero_stage=3)
    assert main([*argv, "--dry_run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert re.search(r"a micro-batch: \d+ rows x \d+ tokens", told) and "memory of each rank" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_batch_of_more_rows_than_there_are_is_told_and_planned(
    tiny_llama, tmp_path, num_processes, monkeypatch, capsys
):
    from hf_zero.recipes.cli import main
    from tests.trainer.harness import reset_accelerate

    monkeypatch.chdir(tmp_path)
    reset_accelerate()
    argv = CASES["sft"].flags(tiny_llama, tmp_path, 3, zero_stage=3)
    sizes = ["--per_device_train_batch_size", "16", "--num_processes", str(num_processes)]
    assert main([*argv, *sizes, "--dry_run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert ("each batch of 16 repeats the" in told) is (num_processes == 2)
    assert ("a micro-batch: 16 rows" in told) is (num_processes == 2)


@pytest.mark.parametrize(
    "values", [[1, "red"], [None, "red"], [[], ["red"]], [{"x": 1}, {"x": 1, "y": 2}], [None, None]], ids=str
)
def test_columns_that_only_later_rows_tell_are_kept(load, values):
    rows = [{"prompt": "the door is", "told": value} for value in values]
    found = [row["told"] for row in load("grpo", rows, **JUDGED).train]
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


def test_what_a_reward_raises_is_raised_as_it_is(tmp_path):
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    code = "def score(text):\n    return 1 / (len(text) - 1)\n"
    code += "def fails(completions, **_):\n    return [score(each) for each in completions]\n"
    code += "def short(completions, **_):\n    return [1.0]\ndef text(completions, **_):\n    return ['good', None]\n"
    (tmp_path / "judges.py").write_text(code)
    names = [f"{tmp_path}/judges.py:{name}" for name in ("fails", "short", "text")]
    fails, short, text = rewards_of(RewardedArguments(reward_funcs=names))
    assert fails.__name__ == "fails" and fails(completions=["abc"]) == [0.5]
    with pytest.raises(ZeroDivisionError) as caught:
        fails(completions=["a"])
    assert caught.traceback[-1].path == tmp_path / "judges.py"
    with pytest.raises(ValueError, match="judges.py:short: returned 1 numbers for 2 completions"):
        short(completions=["a", "b"])
    with pytest.raises(ValueError, match="could not convert"):
        text(completions=["a", "b"])


def test_rows_that_are_left_out_are_counted(tiny_llama, load):
    from hf_zero.recipes.run_config import RunConfig
    from hf_zero.recipes.tasks import TASKS

    long = {"prompt": "the door is", "chosen": " red" * 60, "rejected": " a door"}
    too_long = {**long, "prompt": "red" * 60}
    for task, rows, lost in (("reward", long, "1 row"), ("kto", too_long, "2 rows"), ("dpo", too_long, "1 row")):
        data = load(task, [*preferences(3), rows])
        settings = RunConfig.parse(task, flags(task, tiny_llama, Path("rows.jsonl"))[1:])
        training, module = settings.training_arguments(), TASKS[task].load()
        model = module.load_model(settings.arguments, training, data)
        trainer = module.make_trainer(model, settings.arguments, training, data)
        assert data.notes[-1].startswith(f"train: {lost} left out, too long for max_length ")
        assert len(trainer.eval_dataset) == len(trainer.train_dataset), "test rows are left out too"


@pytest.mark.parametrize(("flags", "wanted"), [([], False), (["--bf16=True"], True), (["--use_cpu=True"], False)])
def test_the_device_decides_the_precision_that_trl_leaves_open(flags, wanted, monkeypatch):
    import torch

    from hf_zero.recipes.run_config import RunConfig

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: "--use_cpu=True" in flags)
    assert RunConfig.parse("dpo", flags).training["bf16"] is wanted
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert RunConfig.parse("dpo", ["--fp16=True"]).training["bf16"] is False
    assert RunConfig.parse("dpo", []).training["bf16"] is True


@pytest.mark.parametrize("has_other_tokens", [True, False])
def test_a_teacher_with_other_tokens_is_refused(tiny_llama, tmp_path, has_other_tokens):
    from transformers import AutoTokenizer

    from hf_zero.recipes.trl_tasks import Distill

    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_llama, teacher)
    if has_other_tokens:
        stored = json.loads((teacher / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = stored["model"]["vocab"]
        one, other = list(vocab)[-2:]
        vocab[one], vocab[other] = vocab[other], vocab[one]
        (teacher / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    training = SimpleNamespace(teacher_model_name_or_path=str(teacher))
    data = SimpleNamespace(processing_class=AutoTokenizer.from_pretrained(tiny_llama))
    if not has_other_tokens:
        assert Distill().parts(None, training, data) == {"teacher_model": str(teacher)}
        return
    with pytest.raises(ConfigError, match="has the id .* there, and .* in the tokenizer of the model; give a teacher"):
        Distill().parts(None, training, data)
