"""The same rows through TRL's SFTTrainer: the same tokens, the same labels, the same losses."""

from pathlib import Path

import pytest

from hf_zero.recipes.data.templates import DEFAULT_TEMPLATE
from hf_zero.recipes.sft import counted_runs
from tests.distributed import run_ranks
from tests.recipes.data.conftest import SENTENCES, chats, completions, write_lines
from tests.recipes.data.tasks import run
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


def compared(folder: Path, cache: Path, model: Path, template: str) -> tuple:
    """Both trainers on one rank: rows and losses of each."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    argv = [f"--{name}={value}" for name, value in SETTINGS.items()]
    argv += ["--model_name_or_path", str(model), "--train_file", str(folder / "rows.jsonl"), "--max_length", "40"]
    if template != DEFAULT_TEMPLATE:
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        argv += ["--chat_template_path", str(folder / "template.jinja")]
    argv += ["--output_dir", str(folder / "ours"), "--zero_stage", "2"]
    ours = run("sft", cache, argv)
    ours["rows"] = run("sft", cache, argv, "data")["rows"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    data = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(cache))
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=SFTConfig(
            **SETTINGS,
            output_dir=str(folder / "theirs"),
            max_length=40,
            assistant_only_loss="messages" in data.column_names,
            completion_only_loss="completion_mask" in data.column_names or None,
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return ours, {"losses": losses, "rows": [dict(row) for row in trainer.train_dataset]}


@pytest.mark.parametrize("kind", in_core(["messages", "settings", "tokens"], ROWS))
def test_rows_masks_and_losses_are_those_of_trl(kind, tmp_path, cache, language_models):
    write_lines(tmp_path / "rows.jsonl", ROWS[kind])
    template = ("{{- note }}" if kind == "settings" else "") + DEFAULT_TEMPLATE
    [(ours, theirs)] = run_ranks(compared, 1, tmp_path, cache, language_models["Llama"], template)
    assert [row["input_ids"] for row in ours["rows"]] == [row["input_ids"] for row in theirs["rows"]]
    assert [row["labels"] for row in ours["rows"]] == [row["labels"] for row in theirs["rows"]]
    assert len(ours["losses"]) == SETTINGS["max_steps"]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)


def unweighted(folder: Path, cache: Path, model: Path) -> list[list[dict]]:
    """Rows as they are tokenized, with weights and without."""
    rows = [{"messages": [dict(turn) for turn in row["messages"]]} for row in chats()]
    found = []
    for name in ("plain", "weighted"):
        write_lines(folder / f"{name}.jsonl", rows)
        argv = ["--model_name_or_path", str(model), "--train_file", str(folder / f"{name}.jsonl")]
        argv += ["--max_length", "128", "--output_dir", str(folder / name)]
        found.append(run("sft", cache, argv, "data")["rows"])
        for row in rows[1::2]:
            row["messages"][1]["weight"] = 0
    return found


def test_a_message_of_weight_0_is_read_and_not_learned(tmp_path, cache, language_models):
    [(plain, weighted)] = run_ranks(unweighted, 1, tmp_path, cache, language_models["Llama"])
    assert [row["input_ids"] for row in plain] == [row["input_ids"] for row in weighted]
    for number, (before, after) in enumerate(zip(plain, weighted, strict=True)):
        first, *others = counted_runs(label != -100 for label in before["labels"])
        found = counted_runs(label != -100 for label in after["labels"])
        assert found == (others if number % 2 else [first]) and len(others) == number % 2
