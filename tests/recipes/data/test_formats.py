"""Formats by their columns, and what is wrong with a row."""

import json
from datetime import date

import pytest
from datasets import Dataset

from hf_zero.errors import DataError
from hf_zero.recipes.data.formats import FORMAT_NAMES, PREFERENCES, PROMPTS, format_of, recognise
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.data.sources import load_rows
from hf_zero.recipes.tasks import SourceArguments
from tests.recipes.preferences import write_rows


pytestmark = pytest.mark.quick


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


IDS, LABELS = {"input_ids": [1]}, {"labels": [1]}


def recognised(rows, *names, column="text"):
    return recognise(rows, names or FORMAT_NAMES, column, vocab_size=10)


def rows_of(folder, *rows):
    return load_rows(SourceArguments(train_file=str(write_rows(folder / "rows.jsonl", list(rows)))), "train")


CHAT, ASKED = {"messages": [USER, ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}
HISTORY = [SYSTEM, {**USER, "content": "One"}, {**ASSISTANT, "content": "Two"}, USER]


@pytest.mark.parametrize(
    ("row", "name", "read"),
    [
        ({"text": "Hi"}, "text", {"text": "Hi"}),
        ({**CHAT, "id": 3}, "messages", CHAT),
        ({"conversations": SHARE_GPT}, "conversations", CHAT),
        ({"conversations": SHARE_GPT, "system": "Be kind"}, "conversations", {"messages": [SYSTEM, USER, ASSISTANT]}),
        ({"conversations": [USER, ASSISTANT]}, "conversations", CHAT),
        ({"prompt": "Hi", "completion": " Hello"}, "prompt", {"prompt": "Hi", "completion": " Hello"}),
        (ASKED, "prompt", ASKED),
        ({"instruction": "Hi", "output": "Hello"}, "alpaca", ASKED),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "alpaca", ASKED),
        (
            {"instruction": "Add", "input": "1 2", "output": "Hello"},
            "alpaca",
            {**ASKED, "prompt": [{"role": "user", "content": "Add\n\n1 2"}]},
        ),
        (
            {"instruction": "Hi", "output": "Hello", "system": "Be kind", "history": [["One", "Two"]]},
            "alpaca",
            {**ASKED, "prompt": HISTORY},
        ),
        (
            {"text": "Hi", "input_ids": [1, 9], "labels": [-100, 0], "completion_mask": [1, 1]},
            "tokenized",
            {"input_ids": [1, 9], "labels": [-100, 0]},
        ),
        (
            {"input_ids": [1], "assistant_masks": [1], "completion_mask": [0], "attention_mask": [1]},
            "tokenized",
            {"input_ids": [1], "completion_mask": [0], "assistant_masks": [1]},
        ),
    ],
)
def test_columns_say_the_format(tmp_path, row, name, read):
    rows = rows_of(tmp_path, row)
    form = recognised(rows)
    assert form.name == name
    found = form.read(rows.example)
    more = {"untrained": []} if "messages" in read else {}
    assert found == {**read, **({"tools": None, "chat_template_kwargs": {}, **more} if form.is_chat else {})}


CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("turn", "read"),
    [
        ({"role": "Human", "content": "Hi"}, USER),
        ({"from": "prompter", "value": "Hi"}, USER),
        *(({"role": role, "content": "Hello"}, ASSISTANT) for role in ("Assistant", "GPT", "model", "bot")),
        ({"role": "observation", "content": "3"}, {"role": "tool", "content": "3"}),
        ({"from": "function_response", "value": "3"}, {"role": "tool", "content": "3"}),
        ({**ASSISTANT, "from": "user", "value": 3}, ASSISTANT),  # metadata beside role and content
        (  # blocks, as OpenAI and LLaMA-Factory have them
            {
                "role": "user",
                "content": [{"type": "text", "text": "H", "image": None}, {"type": "text", "value": "i"}],
            },
            USER,
        ),
        *(
            (
                {"role": role, "content": json.dumps(content)},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
            )
            for role, content in (("function_call", CALL), ("tool_call", [CALL]))
        ),
    ],
)
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_roles_that_other_programs_write_are_read(tmp_path, turn, read, column):
    rows = rows_of(tmp_path, {column: [USER, turn]})
    assert recognised(rows).read(rows.example)["messages"] == [USER, read]


def test_weights_of_messages_say_what_the_loss_does_not_count(tmp_path):
    turns = [USER, {**ASSISTANT, "weight": 0}, {**USER, "weight": 0}, {**ASSISTANT, "train": True}]
    turns += [USER, {**ASSISTANT, "train": False}, USER, {**ASSISTANT, "loss_weight": 1.0}]
    rows = rows_of(tmp_path, {"messages": turns})
    found = recognised(rows).read(rows.example)
    assert found["messages"] == [USER, ASSISTANT] * 4 and found["untrained"] == [0, 2]


def test_settings_of_the_chat_template_are_kept(tmp_path):
    settings = {"enable_thinking": False, "other": None}
    rows = rows_of(tmp_path, {"messages": [USER], "chat_template_kwargs": settings})
    form = recognised(rows)
    found = form.read(rows.example)
    assert found["chat_template_kwargs"] == {"enable_thinking": False}


NO = {**ASSISTANT, "content": "No"}
BLOCKS = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in (USER, ASSISTANT)]
SHARED = {"chosen": SHARE_GPT[1], "rejected": {"from": "gpt", "value": "No"}}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [  # UltraFeedback, answers alone, ShareGPT, blocks of text
        ({"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, NO]}, [USER]),
        ({"prompt": "Hi", "chosen": [ASSISTANT], "rejected": [NO]}, [USER]),
        ({"conversations": SHARE_GPT[:1], **SHARED}, [USER]),
        ({"conversations": SHARE_GPT[:1], "system": "Be kind", **SHARED}, [SYSTEM, USER]),
        ({"chosen": BLOCKS, "rejected": [BLOCKS[0], NO]}, [USER]),
    ],
)
def test_preferences_as_public_data_has_them(tmp_path, row, prompt):
    rows = rows_of(tmp_path, row)
    form = format_of((PREFERENCES,), rows)
    read = {"prompt": prompt, "chosen": [ASSISTANT], "rejected": [NO], "chat_template_kwargs": {}}
    assert form.read(rows.example) == read and list(form.features) == list(read)


def test_a_conversation_is_the_prompt_whatever_a_text_beside_it_says(tmp_path):
    row = {"conversations": SHARE_GPT[:1], **SHARED}
    rows = rows_of(tmp_path, row)
    read = format_of((PREFERENCES,), rows).read({**rows.example, "prompt": "id-17"})
    assert read["prompt"] == [USER]


@pytest.mark.parametrize(
    ("row", "changed", "problem"),
    [
        (
            {"prompt": "Bye", "chosen": [USER, ASSISTANT], "rejected": [USER, NO]},
            {},
            "holds a text that no message has with which chosen and rejected begin",
        ),
        (
            {"chosen": BLOCKS, "rejected": [USER, NO]},
            {"audios": ["a.wav"]},
            "column 'audios' is not empty, and this run trains on texts",
        ),
        (
            {"conversations": SHARE_GPT[:1], **SHARED},
            {"chosen": {**SHARE_GPT[1], "weight": 0}},
            "message 1 of column 'chosen' has weight 0, which only sft honours",
        ),
        ({"prompt": [USER], "chosen": 42, "rejected": 41}, {}, "column 'chosen' holds a int, expected a list of mess"),
    ],
)
def test_preferences_that_cannot_be_read_say_why(tmp_path, row, changed, problem):
    rows = rows_of(tmp_path, row)
    with pytest.raises(BadRow, match=problem):
        format_of((PREFERENCES,), rows).read({**rows.example, **changed})


def test_columns_that_fit_no_format_are_refused_with_those_expected(tmp_path):
    with pytest.raises(DataError) as caught:
        recognised(rows_of(tmp_path, {"question": "Hi", "answer": "Hello"}))
    assert str(caught.value) == (
        f"{tmp_path}/rows.jsonl: columns found ['question', 'answer'], expected text, or messages, or conversations, "
        "or prompt and completion, or instruction and output, or input_ids; rename them, or name the one of texts "
        "with --dataset_text_field"
    )


def test_columns_that_fit_two_formats_are_refused_until_one_is_chosen(tmp_path):
    rows = rows_of(tmp_path, {"instruction": "Hi", "output": "Hello", "text": "Hi Hello"})
    with pytest.raises(DataError, match="fit the formats text and alpaca; choose one with --dataset_format"):
        recognised(rows)
    assert recognised(rows, "alpaca").name == "alpaca"
    with pytest.raises(DataError, match="expected messages; rename"):
        recognised(rows, "messages")


def test_the_column_of_texts_can_have_any_name(tmp_path):
    rows = rows_of(tmp_path, {"body": "Hi"})
    assert recognised(rows, column="body").read(rows.example) == {"text": "Hi"}


TEXT, FIRST, ALPACA = {"text": "Hi"}, {"messages": [USER]}, {"instruction": "a", "output": "b"}
NUMBER = {"prompt": [USER], "completion": 42}
BAD_ROWS = [
    (TEXT, {"text": 5}, "column 'text' holds a int, expected a text"),
    (TEXT, {"other": "Hi"}, "nothing in column 'text'"),
    (TEXT, {"text": "  "}, "nothing in column 'text'"),
    (FIRST, {"messages": "Hi"}, "column 'messages' holds a str, expected a list of messages"),
    (FIRST, {"messages": []}, "nothing in column 'messages'"),
    (FIRST, {"messages": [USER, "x"]}, "message 2 of column 'messages' is a str"),
    (FIRST, {"messages": [{"content": "x"}]}, "message 1 .* has the role '', expected one of"),
    (FIRST, {"messages": [{"role": "user"}]}, "message 1 of column 'messages' has no content"),
    (FIRST, {**FIRST, "tools": "{"}, "column 'tools' holds no JSON"),
    (
        FIRST,
        {"messages": [USER, {"role": "critic", "content": "x"}]},
        "message 2 .* has the role 'critic', expected one",
    ),
    (FIRST, {"messages": [{"role": "function_call", "content": "x"}]}, "its content is no JSON"),
    *(
        (FIRST, {"messages": [{"role": "tool_call", "content": calls}]}, "has no name and arguments")
        for calls in ("[]", '["f"]', '{"arguments": {}}')
    ),
    (FIRST, {"messages": [{**USER, "weight": 0.5}]}, "message 1 .* has weight 0.5, expected 0 or"),
    (FIRST, {"messages": [{**USER, "content": [{"text": "a"}]}]}, "message 1 .* without a type"),
    (FIRST, {"messages": [{**USER, "content": [{"type": "text"}]}]}, "a block of type 'text'"),
    (FIRST, {"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "a block of type 'image_url' without a url"),
    (
        FIRST,
        {"messages": [USER, {**USER, "content": [{"type": "image"}]}]},
        "message 2 .* an image, and this run trains",
    ),
    *((FIRST, {**FIRST, name: ["a.bin"]}, f"column '{name}' is not empty") for name in ("audios", "videos", "images")),
    ({**FIRST, "chat_template_kwargs": {}}, {**FIRST, "chat_template_kwargs": [1]}, "holds a list, expected a dict"),
    (ASKED, {**ASKED, "completion": [{**ASSISTANT, "weight": 0}]}, "a message of weight 0; put the conversation into"),
    ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": [USER]}, "column 'completion' holds a list"),
    ({"prompt": "a", "completion": 3}, {"prompt": "a", "completion": 3}, "column 'completion' holds a int, exp"),
    (NUMBER, NUMBER, "column 'completion' holds a int, expected a list of messages"),
    (
        {**NUMBER, "completion": "Hi"},
        {**NUMBER, "completion": "Hi"},
        "'completion' holds a str, expected a list",
    ),
    (FIRST, {"messages": [USER, {**ASSISTANT, "content": 42}]}, "message 2 .* holds a int as content, expected a"),
    (ALPACA, {"instruction": "a", "output": None}, "nothing in column 'output'"),
    (ALPACA, {**ALPACA, "history": ["One", "Two"]}, "column 'history' holds 'One', expected pairs of a question"),
    ({"conversations": SHARE_GPT}, {"conversations": [{"from": "human"}]}, "message 1 .* has no content"),
    *(
        (IDS, {"input_ids": ids}, "column 'input_ids' holds .*, expected integers from 0 to 9$")
        for ids in ([], "1 2", [1, 2.0], [1, True], [1, None], [[1]], [1, 2**70], [0, 10, 11], [-100])
    ),
    (IDS, IDS | LABELS, "column 'labels', which the first row does not have"),
    (
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": date(2024, 1, 1)},
        "^column 'completion' holds a date, expected a text$",
    ),
    (IDS, {"input_ids": [1, 0], "attention_mask": [1, 0]}, "column 'attention_mask' holds 0, so the row is pad"),
    (IDS | LABELS, {"input_ids": [1, 2], "labels": [1]}, "column 'labels' holds 1 numbers, expected 2"),
    (IDS | LABELS, {"input_ids": [1], "labels": [10]}, r"column 'labels' holds \[10\], .* from 0 to 9, or -100"),
    (IDS | LABELS, {"input_ids": [1]}, "nothing in column 'labels'"),
    (IDS | {"completion_mask": [1]}, IDS | {"completion_mask": [2]}, r"holds \[2\], expected integers from 0 to 1$"),
]


@pytest.mark.parametrize(("good", "bad", "problem"), BAD_ROWS)
def test_a_row_that_does_not_fit_says_why(tmp_path, good, bad, problem):
    form = recognised(rows_of(tmp_path, good))
    with pytest.raises(BadRow, match=problem):
        form.read(bad)


def test_messages_of_arrow_lose_the_keys_that_they_do_not_have(tmp_path):
    """In a Parquet file every message and every call has the keys of all: the others are null."""
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "xy"]
    chats = [[USER, {"role": "assistant", "tool_calls": [call]}] for call in calls]
    Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(SourceArguments(train_file=str(tmp_path / "rows.parquet")), "train")
    found = [values["messages"] for values in map(recognised(rows).read, rows.good())]
    assert found == [[USER, {"content": None, **turn}] for _, turn in chats]


def test_rows_of_prompts_keep_settings_of_the_template_as_any_other_column(tmp_path):
    rows = rows_of(tmp_path, {"prompt": [USER], "chat_template_kwargs": {"a": 1}})
    form = format_of((PROMPTS,), rows)
    assert form.read(rows.example) == {"prompt": [USER], "chat_template_kwargs": {"a": 1}}
