"""Settings and data that cannot work, each refused in one line before a model is loaded."""

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.lora import AdapterArguments, adapt, check_adapter
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS
from tests.distributed import RemoteError, run_ranks
from tests.recipes.data.conftest import chats, completions, write_lines
from tests.recipes.data.tasks import run


ROWS = {"text": [{"text": "Hi"}], "prompt": completions(), "messages": chats()}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("sft", ["--model_name_or_path="], "model_name_or_path: not set"),
        ("sft", ["--model_revision=main"], "model_revision 'main': .* is a folder, which has no revisions"),
        ("sft", ["--dataset_config=en"], "dataset_config: .*rows.jsonl is a file, which has no configurations"),
        ("sft", ["--dataset_format=sharegpt"], "dataset[-_]format: invalid choice: 'sharegpt'"),
        ("sft", ["--chat_template_path=nowhere.jinja"], "chat_template_path nowhere.jinja: cannot be read"),
        ("sft", ["--eval_packing=true"], "eval_packing: test rows are packed as training rows are; add --packing"),
        ("sft", ["--max_length=1"], "max_length 1: expected 2 or more"),
        ("sft", ["--max_length=4096"], "max_length 4096: .* has 128 positions"),
        ("sft", ["--use_peft", "--lora_r=0"], "lora_r 0: expected 1 or more"),
        ("sft", ["--dataset_streaming"], "dataset_streaming: the number of rows is not known; set --max_steps"),
        ("pretrain", ["--dtype=float8"], "dtype: invalid choice: 'float8'"),
        ("sft", ["--dataset_shuffle_buffer=0"], "dataset_shuffle_buffer 0: expected 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(task, given, message, tmp_path, language_models):
    write_lines(tmp_path / "rows.jsonl", ROWS["text"])
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", str(tmp_path / "rows.jsonl")]
    with pytest.raises(ConfigError, match=message) as caught:
        settings = RunConfig.parse(task, [*argv, "--max_length=64", *given])
        TASKS[task].load().check(settings.arguments, settings.training)
    assert "\n" not in str(caught.value)


@pytest.mark.full("slow")
@pytest.mark.parametrize(
    ("task", "rows", "flags", "message"),
    [
        ("pretrain", "messages", [], r"columns found \['messages'\], expected text, or input_ids; rename"),
        ("sft", "text", ["--completion_only_loss", "true"], "completion_only_loss: rows of text have no prompt"),
        ("sft", "text", ["--assistant_only_loss", "true"], "assistant_only_loss: rows of text have no messages"),
        (
            "sft",
            "prompt",
            ["--assistant_only_loss", "true"],
            "assistant_only_loss: rows of prompt, completion",
        ),
        ("sft", "text", ["--chat_template_path", "chat.jinja"], "chat_template_path: rows of .* hold no messages"),
        ("sft", "messages", ["--max_length", "5"], "no row fits into max_length 5; set a larger --max_length"),
        ("sft", "prompt", ["--use_peft", "--lora_target_modules", "nothing"], "Target modules .*nothing.* not found"),
        ("sft", "messages", ["--chat_template_path", "chat.jinja"], "the chat template does not mark what the assist"),
    ],
)
def test_data_that_cannot_work_are_refused_in_one_line(task, rows, flags, message, tmp_path, cache, language_models):
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    write_lines(tmp_path / "rows.jsonl", ROWS[rows])
    flags = [str(tmp_path / flag) if flag == "chat.jinja" else flag for flag in flags]
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", str(tmp_path / "rows.jsonl")]
    argv += ["--max_length", "64"]
    with pytest.raises(RemoteError, match=message) as caught:
        run_ranks(run, 1, task, cache, [*argv, "--output_dir", str(tmp_path / "out"), *flags])
    assert caught.value.kind in ("ConfigError", "DataError")
    assert not list(tmp_path.glob("out/*"))


def test_columns_of_no_format_are_refused_in_one_line(tmp_path, cache, language_models):
    write_lines(tmp_path / "rows.jsonl", [{"question": "Hi"}])
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", str(tmp_path / "rows.jsonl")]
    argv += ["--max_length", "64"]
    with pytest.raises(RemoteError, match=r"DataError: .*rows.jsonl: columns found \['question'\], expected text, or"):
        run_ranks(run, 2, "sft", cache, argv)


def test_an_adapter_takes_peft_and_modules_that_there_are(monkeypatch, language_models):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(language_models["Llama"])
    assert adapt(model, AdapterArguments()) is model
    with pytest.raises(ConfigError, match=r"lora_target_modules \['nothing'\]: Target modules"):
        adapt(model, AdapterArguments(use_peft=True, lora_target_modules=["nothing"]))
    monkeypatch.setattr("hf_zero.recipes.lora.is_peft_available", lambda: False)
    check_adapter(AdapterArguments())
    with pytest.raises(ConfigError, match=r"use_peft: PEFT is not installed; pip install 'hf-zero\[peft\]'"):
        check_adapter(AdapterArguments(use_peft=True))
