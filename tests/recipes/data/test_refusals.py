"""Settings and data that cannot work, each refused in one line before a model is loaded."""

import pytest

from tests.distributed import RemoteError, run_ranks
from tests.recipes.data.conftest import chats, completions
from tests.recipes.data.tasks import run
from tests.recipes.preferences import write_rows


ROWS = {"text": [{"text": "Hi"}], "prompt": completions(), "messages": chats()}


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
    write_rows(tmp_path / "rows.jsonl", ROWS[rows])
    flags = [str(tmp_path / flag) if flag == "chat.jinja" else flag for flag in flags]
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", str(tmp_path / "rows.jsonl")]
    argv += ["--max_length", "64"]
    with pytest.raises(RemoteError, match=message) as caught:
        run_ranks(run, 1, task, cache, [*argv, "--output_dir", str(tmp_path / "out"), *flags])
    assert caught.value.kind in ("ConfigError", "DataError")
    assert not list(tmp_path.glob("out/*"))


def test_columns_of_no_format_are_refused_in_one_line(tmp_path, cache, language_models):
    write_rows(tmp_path / "rows.jsonl", [{"question": "Hi"}])
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--train_file", str(tmp_path / "rows.jsonl")]
    argv += ["--max_length", "64"]
    with pytest.raises(RemoteError, match=r"DataError: .*rows.jsonl: columns found \['question'\], expected text, or"):
        run_ranks(run, 2, "sft", cache, argv)
