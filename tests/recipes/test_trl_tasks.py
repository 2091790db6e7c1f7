"""Tasks of TRL's trainers: what they learn, what their dry runs tell, and which rows and settings are refused."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes import run
from hf_zero.recipes.plan_input import PlanInput
from hf_zero.recipes.run_config import RunConfig
from tests.distributed import run_ranks
from tests.planner import subjects
from tests.recipes.cases import CASES, JUDGED, REWARDS, Loaded, flags, judged, prompts, settings_of
from tests.recipes.preferences import ANSWERS, as_chats, preferences, write_rows
from tests.recipes.ranks import logged, trained
from tests.tensor_meter import TensorMeter
from tests.tiers import in_core
from tests.trainer.harness import reset_accelerate


pytest.importorskip("trl")
pytest.importorskip("peft")

DPO = {"max_length": 48, "beta": 0.5, "max_steps": 8, "per_device_train_batch_size": 8}
GOOD = {"prompt": "the door is", "chosen": " red", "rejected": " a door"}
CHAT = as_chats([GOOD])[0]


def test_two_processes_learn_what_to_prefer_and_leave_a_model_that_generates(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train = write_rows(tmp_path / "train.jsonl", preferences(64))
    test = write_rows(tmp_path / "test.jsonl", preferences(16, seed=1))
    said = trained("dpo", tmp_path, **settings_of(tiny_llama, train, **DPO, test_file=test, zero_stage=3))
    losses, margins = (logged(tmp_path / "out", name) for name in ("loss", "rewards/margins"))
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model itself: log 2
    assert losses[-1] < 0.4 and margins[-1] > margins[0] + 0.5
    accuracy = float(re.search(r"test rows: ([\d.]+) of the chosen answers are preferred", said).group(1))
    assert accuracy > 0.9
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = model.generate(**tokenizer("the door is", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("the door is")


class _Marks(TrainerCallback):
    """Marks the steps of a training."""

    def __init__(self, meter: TensorMeter):
        self._meter = meter

    def on_step_begin(self, args, state, control, **_):
        self._meter.mark(f"step-{state.global_step}")


def _measured(argv: list[str]) -> int:
    """The bytes at the peak of a third step."""
    with TensorMeter() as meter:
        with run._prepared(RunConfig.parse("dpo", argv), {}, "--dry_run") as prepared:
            meter.mark("begin")
            prepared.trainer.add_callback(_Marks(meter))
            prepared.trainer.train()
            meter.mark("end")
    return meter.span("step-2", "end").peak_nbytes


def test_the_peak_of_a_step_with_a_reference_is_the_planned_one(tiny_llama, tmp_path):
    subjects.build("llama").save_pretrained(tmp_path / "model")
    for path in tiny_llama.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    rows = [{"prompt": "the door is", "chosen": " red" * 60, "rejected": " a door" * 60}] * 24
    settings = {"zero_stage": 3, "max_steps": 3, "per_device_train_batch_size": 4, "zero_shared_memory": False}
    data = write_rows(tmp_path / "train.jsonl", rows)
    argv = flags("dpo", tmp_path / "model", data, **{**DPO, "use_cpu": True, **settings})[1:]
    settings = RunConfig.parse("dpo", [*argv, "--num_processes=2"])
    planned = PlanInput.of(settings.kind, settings)
    told = planned.predict()
    assert any(each.name == "reference model" for each in told.classes)
    for measured in run_ranks(_measured, 2, argv):
        assert told.peak_nbytes == pytest.approx(measured, rel=0.03)


@pytest.fixture
def load(tiny_llama, tmp_path, monkeypatch):
    """Reads rows as a run would, before it loads the model."""

    monkeypatch.chdir(tmp_path)

    def call(task: str, rows: list, **settings):
        Path("rewards.py").write_text(REWARDS)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        settings = {"max_length": 48, **settings} if task == "dpo" else settings
        settings = {name: tiny_llama if value == "MODEL" else value for name, value in settings.items()}
        call.loaded = Loaded(flags(task, tiny_llama, Path("rows.jsonl"), **settings))
        return call.loaded.data

    return call


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("kto", [*judged(1), {"prompt": "a", "completion": "b", "label": 1}], "line 3: column 'label' holds 1"),
        ("kto", [{"prompt": "a"}], "expected prompt and completion and label, or chosen and rejected"),
        ("grpo", [*prompts(1), {"prompt": "", "colour": "red"}], "line 2: nothing in column 'prompt'"),
        ("grpo", [{"text": "a"}], "expected prompt; rename them"),
        ("reward", [{"chosen": "a"}], "expected chosen and rejected; rename them"),
        (
            "dpo",
            [{"prompt": "x", "completion": "y"}],
            r"columns found \['prompt', 'completion'\], expected chosen and rej",
        ),
        ("dpo", [GOOD, {**GOOD, "chosen": ""}], "line 2: nothing in column 'chosen'"),
        ("dpo", [GOOD, {"prompt": "the", "chosen": "red"}], "line 2: nothing in column 'rejected'; .*--skip_bad_rows"),
        ("dpo", [GOOD, {**GOOD, "rejected": {"a": 1}}], "line 2: column 'rejected' holds a dict, expected a text"),
        ("dpo", [GOOD, {**GOOD, "rejected": CHAT["rejected"]}], "line 2: column 'rejected' holds a list"),
        ("dpo", [GOOD, "{"], "line 2: not JSON"),
        ("dpo", [CHAT, {**CHAT, "chosen": "red"}], "line 2: column 'chosen' holds a str, expected a list of messages"),
        ("dpo", [CHAT, {**CHAT, "chosen": [{"role": "assistant"}]}], "message 1 of column 'chosen' has no content"),
        (
            "dpo",
            [CHAT, {**CHAT, "tools": [{"name": "search"}]}],
            "column 'tools' holds tools, which are not supported",
        ),
        ("dpo", [CHAT, {**CHAT, "prompt": []}], "nothing in column 'prompt'"),
        ("dpo", [{"chosen": "yes", "rejected": "no"}], "begin differently, and there is no column 'prompt'"),
        ("dpo", [{"chosen": "the same", "rejected": "the same"}], "is what the other begins with"),
    ],
)
def test_rows_that_a_task_cannot_take_are_named(load, task, rows, message):
    with pytest.raises(DataError, match=message):
        load(task, rows, **(JUDGED if task == "grpo" else {}))


TEXT, MESSAGES = {"text": "the door is red"}, {"messages": CHAT["prompt"] + CHAT["chosen"]}
PAIR = {"prompt": GOOD["prompt"], "completion": GOOD["chosen"]}


@pytest.mark.parametrize(
    ("task", "row", "settings", "message"),
    [
        ("pretrain", MESSAGES, {}, r"columns found \['messages'\], expected text, or input_ids; rename"),
        ("sft", {"question": "Hi"}, {}, r"rows.jsonl: columns found \['question'\], expected text, or"),
        ("sft", TEXT, {"completion_only_loss": True}, "completion_only_loss: rows of text have no prompt"),
        ("sft", TEXT, {"assistant_only_loss": True}, "assistant_only_loss: rows of text have no messages"),
        ("sft", PAIR, {"assistant_only_loss": True}, "assistant_only_loss: rows of prompt, completion"),
        ("sft", TEXT, {"chat_template_path": "chat.jinja"}, "chat_template_path: rows of .* hold no messages"),
        ("dpo", GOOD, {"chat_template_path": "default"}, "chat_template_path: rows of .* hold no messages; leave"),
        ("sft", MESSAGES, {"chat_template_path": "chat.jinja"}, "the chat template does not mark what the assist"),
        ("sft", MESSAGES, {"max_length": 5}, "no row fits into max_length 5; set a larger --max_length"),
        ("sft", PAIR, {"use_peft": True, "lora_target_modules": "nothing"}, "Target modules .*nothing.* not found"),
    ],
)
def test_rows_and_settings_that_do_not_go_together_are_refused(load, task, row, settings, message):
    Path("chat.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        load(task, [row], **{"max_length": 48, **settings})
        load.loaded.make_trainer()
    assert "\n" not in str(caught.value) and not list(Path().glob("out/*"))


def test_bad_rows_are_left_out_and_counted(load):
    data = load("dpo", [GOOD, "{", {**GOOD, "prompt": None}, GOOD], skip_bad_rows=True)
    assert list(data.train) == [GOOD, GOOD]
    assert data.notes[:2] == ["train: 2 rows", "train: 2 bad rows left out"]
    with pytest.raises(DataError, match="rows.jsonl: no good row, expected one at least"):
        load("dpo", [{**GOOD, "chosen": ""}], dataset_streaming=True, skip_bad_rows=True)


def test_a_prompt_that_is_not_given_is_found_as_trl_finds_it(load):
    from trl.data_utils import extract_prompt

    implicit = {"chosen": "the door is red and old", "rejected": "the door is round"}
    assert list(load("dpo", [implicit]).train) == [extract_prompt(implicit)]
    chats = {name: CHAT["prompt"] + CHAT[name] for name in ANSWERS}
    assert list(load("dpo", [chats]).train) == [extract_prompt(chats) | {"chat_template_kwargs": {}}]


def test_the_settings_keep_the_template_that_the_next_run_is_compared_with(load):
    load("dpo", [CHAT], chat_template_path="default")
    assert load.loaded.config.values()["chat_template_path"] == "default"


def test_both_answers_must_be_rendered(load):
    template = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}"
    Path("chat.jinja").write_text(template, encoding="utf-8")
    lost = {name: [{"role": "tool", "content": "3"}, *CHAT[name]] for name in ANSWERS}
    for name, messages in lost.items():
        with pytest.raises(DataError, match="line 2: the chat template leaves out message 2, of role 'tool'"):
            load("dpo", [CHAT, {**CHAT, name: messages}], chat_template_path="chat.jinja")


def test_prompts_keep_their_other_columns_for_the_rewards(load, tiny_llama):
    values = ["red", "42", "1e3", "true", '"red"', "", None, 42, 4.5, True, ["1"], {"a": "1", "b": None}]
    rows = [{"prompt": "the door is", "colour": value} for value in values]
    assert list(load("grpo", rows, **JUDGED).train) == rows
    Path("rows.csv").write_text("prompt,colour\nthe door is,1e3\nthe door is,003\n", encoding="utf-8")
    data = Loaded(flags("grpo", tiny_llama, Path("rows.csv"), **JUDGED)).data
    assert [row["colour"] for row in data.train] == ["1e3", "003"]


@pytest.mark.parametrize("name", in_core(["reward", "grpo"], [name for name in CASES if name != "classify"]))
def test_a_dry_run_tells_the_memory(tiny_llama, tmp_path, name, monkeypatch, capsys):
    from hf_zero.recipes.cli import main

    monkeypatch.chdir(tmp_path)
    reset_accelerate()
    argv = CASES[name].flags(tiny_llama, tmp_path, 8, zero_stage=3)
    assert main([*argv, "--dry_run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert re.search(r"a micro-batch: \d+ rows x \d+ tokens", told) and "memory of each rank" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "values", [[1, "red"], [None, "red"], [[], ["red"]], [{"x": 1}, {"x": 1, "y": 2}], [None, None]], ids=str
)
def test_columns_that_only_later_rows_tell_are_kept(load, values):
    rows = [{"prompt": "the door is", "told": value} for value in values]
    found = [row["told"] for row in load("grpo", rows, **JUDGED).train]
    assert found[1] == values[1] and len(found) == 2


def test_what_a_reward_raises_is_raised_as_it_is(tmp_path):
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    code = "def score(text):\n    return 1 / (len(text) - 1)\n"
    code += "def fails(completions, **_):\n    return [score(each) for each in completions]\n"
    code += "def short(completions, **_):\n    return [1.0]\n"
    code += "def streams(completions, **_):\n    yield from map(len, completions)\n"
    code += "number = 3\n"
    (tmp_path / "judges.py").write_text(code)
    names = [f"{tmp_path}/judges.py:{name}" for name in ("fails", "short", "streams")]
    fails, short, streams = rewards_of(RewardedArguments(reward_funcs=names))
    assert fails.__name__ == "fails" and fails(completions=["abc"]) == [0.5]
    with pytest.raises(ZeroDivisionError) as caught:
        fails(completions=["a"])
    assert caught.traceback[-1].path == tmp_path / "judges.py"
    with pytest.raises(ValueError, match="judges.py:short: returned 1 numbers for 2 completions"):
        short(completions=["a", "b"])
    assert streams(completions=["a", "bc"]) == [1, 2]
    with pytest.raises(ConfigError, match="'number' is no function there"):
        rewards_of(RewardedArguments(reward_funcs=[f"{tmp_path}/judges.py:number"]))


def test_rows_that_are_left_out_are_counted(load):
    long = {"prompt": "the door is", "chosen": " red" * 60, "rejected": " a door"}
    too_long = {**long, "prompt": "red" * 60}
    for task, rows, lost in (("reward", long, "1 row"), ("kto", too_long, "2 rows"), ("dpo", too_long, "1 row")):
        data = load(task, [*preferences(3), rows], max_length=48)
        trainer = load.loaded.make_trainer()
        assert data.notes[-1].startswith(f"train: {lost} left out, too long for max_length ")
        assert len(trainer.eval_dataset) == len(trainer.train_dataset), "test rows are left out too"


@pytest.mark.parametrize(("flags", "wanted"), [([], False), (["--bf16=True"], True), (["--use_cpu=True"], False)])
def test_the_device_decides_the_precision_that_trl_leaves_open(flags, wanted, monkeypatch):
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: "--use_cpu=True" in flags)
    assert RunConfig.parse("dpo", flags).training["bf16"] is wanted
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert RunConfig.parse("dpo", ["--fp16=True"]).training["bf16"] is False
    assert RunConfig.parse("dpo", []).training["bf16"] is True


@pytest.mark.parametrize("has_other_tokens", [True, False])
def test_a_teacher_with_other_tokens_is_refused(tiny_llama, tmp_path, has_other_tokens):
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_llama, teacher)
    if has_other_tokens:
        stored = json.loads((teacher / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = stored["model"]["vocab"]
        one, other = list(vocab)[-2:]
        vocab[one], vocab[other] = vocab[other], vocab[one]
        (teacher / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    rows = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the door is"}])
    flags = [f"--model_name_or_path={tiny_llama}", f"--teacher_model_name_or_path={teacher}"]
    flags += [f"--train_file={rows}", f"--output_dir={tmp_path / 'out'}", "--max_completion_length=6"]
    if not has_other_tokens:
        RunConfig.resolve("distill", flags)
        return
    with pytest.raises(ConfigError, match="has the id .* there, and .* in the tokenizer of the model; give a teacher"):
        RunConfig.resolve("distill", flags)


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
