"""The same rows through TRL's SFTTrainer: the same tokens, the same labels, the same losses."""

import pytest

from hf_zero.recipes.data.templates import DEFAULT_TEMPLATE
from hf_zero.recipes.sft import counted_runs
from tests.distributed import ranks
from tests.recipes.data.conftest import SENTENCES, chats, completions
from tests.recipes.data.tasks import run, trained_by_trl
from tests.recipes.preferences import write_rows
from tests.tiers import in_core


ROWS = {
    "text": [{"text": sentence} for sentence in SENTENCES],
    "prompt": completions(),
    "chat prompt": [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats()],
    "messages": chats(),
    "settings": [{**row, "chat_template_kwargs": {"note": f"as {n}"}} for n, row in enumerate(chats())],
    "tokens": [
        {"input_ids": [*range(n, 2 * n)], "completion_mask": [int(i > n / 3) for i in range(n)]}
        | {"assistant_masks": [int(i % 7 != 3) for i in range(n)]}
        for n in range(8, 44, 2)
    ],
    "labels": [{"input_ids": [*range(n, 2 * n)], "labels": [-100] * 5 + [9] * (n - 5)} for n in range(8, 44, 2)],
}
SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "seed": 7,
}


@pytest.mark.parametrize("kind", in_core(["messages", "settings", "tokens"], ROWS))
@ranks(1)
def test_rows_masks_and_losses_are_those_of_trl(kind, tmp_path, cache, language_models):
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, rows = language_models["Llama"], write_rows(tmp_path / "rows.jsonl", ROWS[kind])
    template = ("{{- note }}" if kind == "settings" else "") + DEFAULT_TEMPLATE
    argv = [f"--{name}={value}" for name, value in SETTINGS.items()]
    argv += ["--model_name_or_path", str(model), "--train_file", str(rows), "--max_length", "40"]
    if template != DEFAULT_TEMPLATE:
        (tmp_path / "template.jinja").write_text(template, encoding="utf-8")
        argv += ["--chat_template_path", str(tmp_path / "template.jinja")]
    argv += ["--output_dir", str(tmp_path / "ours"), "--zero_stage", "2"]
    losses, ours = run("sft", cache, argv)["losses"], run("sft", cache, argv, "data")["rows"]

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    data = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(cache))
    settings = {
        **{**SETTINGS, "max_length": 40, "assistant_only_loss": "messages" in data.column_names},
        "completion_only_loss": "completion_mask" in data.column_names or None,
    }
    plain = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trainer = trained_by_trl("SFT", plain, data, tokenizer, tmp_path, settings)
    theirs = list(trainer.train_dataset)
    assert [row["input_ids"] for row in ours] == [row["input_ids"] for row in theirs]
    assert [row["labels"] for row in ours] == [row["labels"] for row in theirs]
    assert len(losses) == SETTINGS["max_steps"]
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(expected, abs=1e-5)


@ranks(1)
def test_a_message_of_weight_0_is_read_and_not_learned(tmp_path, cache, language_models):
    rows, found = [{"messages": [dict(turn) for turn in row["messages"]]} for row in chats()], []
    for name in ("plain", "weighted"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
        argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", f"{tmp_path}/{name}.jsonl"]
        found.append(run("sft", cache, [*argv, "--max_length=128", f"--output_dir={tmp_path / name}"], "data")["rows"])
        for row in rows[1::2]:
            row["messages"][1]["weight"] = 0
    for number, (before, after) in enumerate(zip(*found, strict=True)):
        assert before["input_ids"] == after["input_ids"]
        first, *others = counted_runs(label != -100 for label in before["labels"])
        runs = counted_runs(label != -100 for label in after["labels"])
        assert runs == (others if number % 2 else [first]) and len(others) == number % 2
