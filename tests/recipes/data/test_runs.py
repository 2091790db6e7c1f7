"""Whole runs of sft and pretrain: from JSON lines to a folder that plain transformers loads and generates with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed import run_ranks
from tests.recipes.data.conftest import SENTENCES, chats, completions
from tests.recipes.data.tasks import mean_token_loss, run
from tests.recipes.preferences import write_rows
from tests.recipes.ranks import logged, run_on_ranks
from tests.tiers import more


MIXED = ["--dataset_mixing", "interleave"]
IN_ORDER = ["--train_sampling_strategy", "sequential"]


def generated(folder: Path, prompt: str | list) -> str:
    """What plain transformers makes of a prompt with what a run left."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if isinstance(prompt, list):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(tokens)


def flags(tmp_path: Path, model: Path, *more: str) -> list[str]:
    argv = ["--model_name_or_path", str(model), "--train_file", str(tmp_path / "rows.jsonl"), "--max_length", "64"]
    argv += ["--output_dir", str(tmp_path / "out"), "--learning_rate", "0.02", "--per_device_train_batch_size", "3"]
    return [*argv, *more]


@pytest.mark.quick
def test_sft_from_the_command_line_on_two_processes(tmp_path, language_models):
    """Every row gets the same answer, so that it is learnt by heart in a few steps."""
    answer = {"role": "assistant", "content": SENTENCES[0]}
    write_rows(tmp_path / "rows.jsonl", [{"messages": [row["messages"][0], answer]} for row in chats()])
    argv = flags(tmp_path, language_models["Qwen3"], "--num_processes", "2", "--num_train_epochs", "12")
    argv += ["--report_to", "none", "--save_strategy", "no", "--logging_steps", "6", "--zero_stage", "3"]
    result, other = run_on_ranks(["sft", *argv], tmp_path)
    assert (result.code, other.code, other.out) == (0, 0, ""), result.err + other.err
    losses = logged(tmp_path / "out", "loss")
    assert len(losses) == 6
    assert losses[-1] < 0.2 * losses[0]
    assert f"train: {tmp_path}/rows.jsonl, format messages; the loss counts what the assistant says" in result.out
    assert result.out.count("chat template: our default, as the tokenizer has none") == 1
    assert generated(tmp_path / "out", chats()[3]["messages"][:1]) == f"{SENTENCES[0]}<|endoftext|>"


@pytest.mark.parametrize("strategy", [*more("bfd_split"), "wrapped"])
def test_pretrain_on_two_ranks(tmp_path, cache, language_models, tokenizer, strategy):
    write_rows(tmp_path / "rows.jsonl", [{"text": " ".join(SENTENCES)}] * 6 + [{"text": "The cat"}] * 3)
    argv = flags(tmp_path, language_models["Llama"], "--num_train_epochs", "8", "--zero_stage", "2")
    argv += ["--test_file", str(tmp_path / "rows.jsonl"), "--packing_strategy", strategy]
    found = run_ranks(run, 2, "pretrain", cache, argv)[0]
    assert found["losses"][-1] < 0.2 * found["losses"][0]
    assert any(note.startswith("train: 9 rows packed into ") for note in found["notes"])
    assert generated(tmp_path / "out", "The cat purrs in the house. The cat purrs in").startswith(" the garden")
    rows = run_ranks(run, 1, "pretrain", cache, argv, "data")[0]["rows"]
    lengths = [len(row["input_ids"]) for row in rows]
    assert max(lengths) == 64
    num_tokens = [len(tokenizer(text + "<|endoftext|>")["input_ids"]) for text in (" ".join(SENTENCES), "The cat")]
    assert sum(lengths) == 6 * num_tokens[0] + 3 * num_tokens[1]
    if strategy == "wrapped":
        assert found["eval_loss"] == pytest.approx(mean_token_loss(tmp_path / "out", rows), abs=1e-4)


@pytest.mark.full("slow")
def test_a_stream_trains_as_the_file_does(tmp_path, cache, language_models):
    """In the order of the files, which does not matter where one step has them all."""
    (tmp_path / "rows").mkdir()
    for task, rows in (("sft", completions()), ("pretrain", [{"text": sentence} for sentence in SENTENCES * 2])):
        write_rows(tmp_path / "rows" / "a.jsonl", rows[:3])
        write_rows(tmp_path / "rows" / "b.jsonl", rows[3:])
        argv = ["--model_name_or_path", str(language_models["Llama"]), "--dataset_name", str(tmp_path / "rows")]
        argv += ["--max_steps", "3", "--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "3"]
        argv += ["--max_length", "16", "--output_dir", str(tmp_path / "out"), "--learning_rate", "0.02"]
        whole = run_ranks(run, 2, task, cache, argv)[0]
        streamed = run_ranks(run, 2, task, cache, [*argv, "--dataset_streaming", *IN_ORDER])[0]
        assert streamed["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert "train: a stream of rows" in streamed["notes"]


def test_rows_that_are_tokenized_become_what_texts_do(tmp_path, cache, language_models, tokenizer):
    """Cut, packed and joined, at the end of which stands what is said of them."""
    texts = SENTENCES + [" ".join(SENTENCES)]
    write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    ids = [{"input_ids": tokenizer(text + tokenizer.eos_token)["input_ids"]} for text in texts]
    write_rows(tmp_path / "ids.jsonl", ids)
    for task, how in (("sft", []), ("sft", ["--packing"]), ("pretrain", []), ("sft", ["--dataset_streaming"])):
        argv = flags(tmp_path, language_models["Llama"], "--max_steps", "1", *how)
        files = (str(tmp_path / name) for name in ("texts.jsonl", "ids.jsonl"))
        of_texts, of_ids = (run_ranks(run, 1, task, cache, [*argv, "--train_file", file], "data")[0] for file in files)
        keys = ("input_ids", "labels", "seq_lengths")
        assert [[row.get(key) for key in keys] for row in of_ids["rows"]] == [
            [row.get(key) for key in keys] for row in of_texts["rows"]
        ]
        assert of_ids["notes"][1:] == of_texts["notes"][1:]
        assert of_ids["notes"][0] == f"train: {tmp_path}/ids.jsonl, format tokenized; the loss counts all tokens"
        assert of_ids["sample"] == of_texts["sample"]


def test_texts_end_with_the_token_that_is_set(tmp_path, cache, language_models, tokenizer):
    write_rows(tmp_path / "rows.jsonl", [{"text": sentence} for sentence in SENTENCES])
    argv = flags(tmp_path, language_models["Llama"], "--eos_token", "<|im_end|>")
    rows = run_ranks(run, 1, "sft", cache, argv, "data")[0]["rows"]
    assert {row["input_ids"][-1] for row in rows} == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize(
    "how",
    [
        ["--packing"],
        *more(["--dataset_streaming"], ["--dataset_format", "tokenized"], MIXED, [*MIXED, "--dataset_streaming"]),
    ],
    ids=lambda how: "".join(how[-2:]),
)
def test_a_run_that_is_interrupted_ends_bit_for_bit_as_one_that_is_not(tmp_path, language_models, how):
    write_rows(tmp_path / "rows.jsonl", [{**row, "input_ids": [*range(5, 20)]} for row in chats()])
    how = [*how, *(() if "tokenized" in how else ("--dataset_format", "messages"))]
    argv = ["sft", *flags(tmp_path, language_models["Qwen3"], "--max_steps", "5", "--save_steps", "2", *how)]
    if "interleave" in how:
        entries = [{"path": str(tmp_path / "rows.jsonl"), "fraction": share} for share in (3, 1)]
        argv = argv[:3] + argv[5:] + ["--datasets", *map(json.dumps, entries)]
    argv += ["--report_to", "none", "--zero_stage", "3", "--per_device_train_batch_size", "1"]
    for more_flags in ([], ["--resume", str(tmp_path / "out" / "checkpoint-2"), "--output_dir", "again"]):
        for rank in run_on_ranks([*argv, *more_flags], tmp_path):
            assert rank.code == 0, rank.err
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole) and len(whole) == len(again) > 0


def test_bad_rows_and_long_rows_are_counted_and_the_first_row_is_shown(tmp_path, cache, language_models, tokenizer):
    rows = [{"prompt": "The cat", "completion": " purrs."}, {"prompt": "The dog", "completion": 5}]
    rows += [{"prompt": "The bird sings", "completion": " in the garden, and the house, and the morning"}]
    rows += [{"prompt": "The fish " * 20, "completion": " swims"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    argv = flags(tmp_path, language_models["Llama"], "--max_length", "12", "--skip_bad_rows")
    found = run_ranks(run, 1, "sft", cache, argv, "data")[0]
    assert found["sample"] == "The cat⟦ purrs.<|endoftext|>⟧"
    ids = [tokenizer(row["prompt"] + str(row["completion"]) + "<|endoftext|>")["input_ids"] for row in rows]
    labels = [row["labels"] for row in found["rows"]]
    num_counted = sum(label != -100 for row in labels for label in row)
    lost = sum(len(ids[number]) for number in (0, 2, 3)) - sum(map(len, labels))
    assert found["notes"] == [
        f"train: {tmp_path}/rows.jsonl, format prompt; the loss counts the completion",
        "train: 3 rows",
        "train: 1 bad row left out",
        "train: 1 row left out, of which the loss counts none of the 12 tokens",
        f"train: {lost} tokens lost, of rows longer than 12 tokens",
        f"train: {sum(map(len, labels))} tokens, of which the loss counts {num_counted}",
    ]
    assert len(found["rows"]) == 2
    everything = run_ranks(run, 1, "sft", cache, [*argv, "--completion_only_loss", "false"], "data")[0]
    assert everything["sample"] == "⟦The cat purrs.<|endoftext|>⟧"
    assert len(everything["rows"]) == 3
    # test rows of another format are counted by their own
    write_rows(tmp_path / "test.jsonl", chats())
    tested = run_ranks(run, 1, "sft", cache, [*argv, "--max_length=64", f"--test_file={tmp_path}/test.jsonl"], "data")[
        0
    ]
    told = f"test: {tmp_path}/test.jsonl, format messages; the loss counts what the assistant says"
    assert {found["notes"][0], told} <= {*tested["notes"]}
