"""Answers to test rows, before and after training."""

import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from hf_zero.recipes.generation import MAX_NEW_TOKENS, WIDTH, _questions, question_of
from tests.recipes.preferences import as_chats, preferences, write_rows
from tests.recipes.ranks import trained
from tests.tiers import more


pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.fixture
def train(tiny_llama, tmp_path):
    """Trains on preferences or completions, on two ranks; gives what was said."""

    def call(task: str, chats: bool = False, **settings) -> str:
        for name, rows in (("train", preferences(32)), ("test", preferences(8, seed=1))):
            rows = as_chats(rows) if chats else rows
            if task == "sft":
                rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
            settings[f"{name}_file"] = write_rows(tmp_path / f"{name}.jsonl", rows)
        settings = {"max_length": 48, "learning_rate": 1e-2, "max_steps": 4, "bf16": False, **settings}
        return trained(task, tmp_path, model_name_or_path=tiny_llama, per_device_train_batch_size=4, **settings)

    return call


def expected(folder: Path, prompts: list) -> list[str]:
    """Greedy answers, as transformers gives them one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        num_new = min(MAX_NEW_TOKENS, 64 - max(len(tokenizer(each)["input_ids"]) for each in prompts))
        tokens = model.generate(inputs["input_ids"], max_new_tokens=num_new, do_sample=False)
        found.append(tokenizer.decode(tokens[0, length:], skip_special_tokens=True))
    return found


def printed(title: str, texts: list[str]) -> list[str]:
    """The lines that are printed for texts."""
    return [f"{title}{textwrap.shorten(text, WIDTH, placeholder=' ...') or repr(text)}" for text in texts]


@pytest.mark.parametrize("stage", [3, *more(2)])
def test_sft_answers_test_rows_before_and_after(train, tiny_llama, tmp_path, stage):
    said = train("sft", zero_stage=stage).splitlines()
    tests = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text(encoding="utf-8").splitlines()][:3]
    prompts = [row["prompt"] for row in tests]
    before, after = (expected(folder, prompts) for folder in (tiny_llama, tmp_path / "out"))
    assert before != after
    lines = zip(printed("  ", prompts), printed("    before: ", before), strict=True)
    first = said.index("answers to 3 test rows, before training:")
    assert said[first + 1 : first + 7] == [line for each in lines for line in each]
    second = said.index("answers to 3 test rows, after training:")
    expectations = printed("    expected: ", [row["completion"] for row in tests])
    lines = zip(printed("  ", prompts), printed("    before: ", before), printed("    after: ", after), expectations)
    assert said[second + 1 : second + 13] == [line for each in lines for line in each]


@pytest.mark.full("slow")
def test_training_does_not_depend_on_samples(train, tmp_path):
    """Dropout of an adapter draws random numbers in each step."""
    weights = []
    for samples in (0, 3):
        said = train("dpo", chats=True, samples=samples, output_dir=f"out-{samples}", use_peft=True, lora_dropout=0.2)
        assert ("answers to 3 test rows" in said) == (samples > 0)
        weights.append(load_file(tmp_path / f"out-{samples}" / "adapter_model.safetensors"))
    without, with_samples = weights
    assert all(tensor.equal(with_samples[name]) for name, tensor in without.items())


USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"messages": [USER, SAID, USER, SAID], "tools": None}, ([USER, SAID, USER], "b")),
        ({"messages": [USER]}, ([USER], None)),
        ({"prompt": "a", "completion": "b"}, ("a", "b")),
        ({"prompt": "a", "completion": "b", "label": False}, ("a", None)),
        ({"prompt": [USER], "chosen": [SAID], "rejected": [USER]}, ([USER], "b")),
        ({"prompt": "a", "answer": "b"}, ("a", None)),
        (
            {"text": "one two three four five six seven eight nine"},
            ("one two three four five six seven eight", "nine"),
        ),
    ],
)
def test_what_is_asked_of_a_row(row, question):
    assert question_of(row) == question


def test_of_a_tokenized_row_the_tokens_that_the_loss_counts_are_the_answer():
    generator = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), room=len)
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6], "completion_mask": [0, 1]},
    ]
    asked = list(_questions(rows, generator))
    assert asked == [({"prompt": "[5, 6]", "expected": "[7, 8]"}, [5, 6]), ({"prompt": "[5]", "expected": "[6]"}, [5])]
