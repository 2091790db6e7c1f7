"""Rows of answers and of prompts, as TRL's trainers take them: texts, or lists of messages.

| format | columns |
|---|---|
| `PREFERENCES` | `chosen` and `rejected`, and `prompt`, ShareGPT's `conversations`, or what both begin with |
| `JUDGED` | `prompt`, `completion`, and `label`: whether the completion is good |
| `PROMPTS` | `prompt`; other columns are kept, for functions that judge what is generated |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasets import Features, Json, List, Value

from hf_zero.errors import DataError
from hf_zero.recipes.data.formats import TEMPLATE_KWARGS, WEIGHTS, Format, Message, chat_in, system_of
from hf_zero.recipes.data.rows import BadRow, Rows, text_of


ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)
_MESSAGES = List({"role": Value("string"), "content": Value("string")})


@dataclass(frozen=True)
class Answers(Format):
    """A format of prompts, perhaps with answers: texts, or messages of texts that call no tools."""

    asks: tuple[str, ...] = ()  # the columns of one conversation
    others: Features = field(default_factory=Features)  # further columns that are kept

    @property
    def features(self) -> Features:
        settings = {TEMPLATE_KWARGS: Json()} if self.is_chat and self.has_settings else {}
        kind = _MESSAGES if self.is_chat else Value("string")
        return Features({**dict.fromkeys(self.gives, kind), **settings, **self.others})

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes what the trainer takes of a row. Raises [`BadRow`] where `Format.read` does, and for tools."""
        if row.get("tools"):
            raise BadRow("column 'tools' holds tools, which are not supported")
        values = super().read(row)
        return {name: values[name] for name in self.features}

    def chat_of(self, row: dict[str, Any]) -> list[Message] | None:
        return [turn for column in self.asks for turn in row[column]] if self.is_chat else None

    def prompt_of(self, row: dict[str, Any]) -> str | list[Message]:
        return row["prompt"]


def _given(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    check = partial(_chat, form=form) if form.is_chat else text_of
    columns = ["prompt" if column == "conversations" else column for column in form.columns]
    return {column: check(row[column], column) for column in columns if column in form.gives}


def _chat(turns: Any, column: str, form: Answers) -> list[Message]:
    messages = chat_in(turns, column, form)
    for number, message in enumerate(messages, start=1):
        if message.get("tool_calls"):
            raise BadRow(f"message {number} of column {column!r} calls tools, which is not supported")
        if any(message.get(key, 1) == 0 for key in WEIGHTS):
            raise BadRow(f"message {number} of column {column!r} has weight 0, which only sft honours")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _preference(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    if form.is_chat:  # ShareGPT's answers are one message each
        row = {**row, **{name: [row[name]] for name in ANSWERS if isinstance(row[name], dict)}}
    if "conversations" in form.columns:
        values = _given(form, {**row, "prompt": row["conversations"]})
        return {**values, "prompt": system_of(row) + values["prompt"]}
    if form.is_chat and isinstance(row.get("prompt"), str):
        return _asked_in_text(_given(replace(form, columns=ANSWERS), row), text_of(row["prompt"], "prompt"))
    values = _given(form, row)
    return values if "prompt" in values else _with_prompt(values["chosen"], values["rejected"])


def _asked_in_text(values: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Messages whose prompt is a text: answers alone, or, as in UltraFeedback, conversations that begin with it."""
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return {"prompt": [{"role": "user", "content": prompt}], **values}
    values = _with_prompt(chosen, rejected)
    if not any(turn["content"].strip() == prompt.strip() for turn in values["prompt"]):
        raise BadRow("column 'prompt' holds a text that no message has with which chosen and rejected begin")
    return values


def _judged(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    label = row["label"]
    if isinstance(label, str):  # of a table
        label = {"true": True, "false": False}.get(label.strip().lower(), label)
    if not isinstance(label, bool):
        raise BadRow(f"column 'label' holds {label!r}, expected true or false")
    return {**_given(form, row), "label": label}


def _asked(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    values = _given(form, row)
    return values | {name: row.get(name) for name in form.others}


PREFERENCES = Answers("preferences", ANSWERS, COLUMNS, _preference, asks=("prompt", "chosen"))
_PAIR, _LABEL = ("prompt", "completion"), Features({"label": Value("bool")})
JUDGED = Answers("judged", (*_PAIR, *_LABEL), _PAIR, _judged, asks=_PAIR, others=_LABEL)
PROMPTS = Answers("prompts", ("prompt",), ("prompt",), _asked, asks=("prompt",), takes_settings=False)


def format_of(formats: Sequence[Answers], rows: Rows) -> Answers:
    """How rows are read: by the first of several formats all of whose columns they have, as texts or chats like the
    first row. Raises [`DataError`] where a column is missing."""
    if len(formats) == 1:
        rows.require(formats[0].columns)
    form = next((each for each in formats if set(each.columns) <= set(rows.columns)), None)
    if form is None:
        expected = ", or ".join(" and ".join(each.columns) for each in formats)
        raise DataError(f"{rows.source}: columns found {rows.columns}, expected {expected}; rename them")
    if form is PREFERENCES and "prompt" in rows.columns:  # without one, what the two answers begin with alike is it
        form = replace(form, columns=COLUMNS)
    elif form is PREFERENCES and "conversations" in rows.columns:  # ShareGPT's name for it
        form = replace(form, columns=("conversations", *ANSWERS))
    if form is PROMPTS:
        form = replace(form, others=_features_beside(rows, "prompt"))
    else:
        form = replace(form, has_settings=TEMPLATE_KWARGS in rows.columns)
    return replace(form, is_chat=isinstance(rows.example[form.asks[-1]], list | dict))


def _features_beside(rows: Rows, column: str) -> Features:
    """The kinds of all columns but one: of lines, any JSON."""
    if rows.form == "columns":
        return Features({name: kind for name, kind in rows.data.features.items() if name != column})
    names = {name: None for row in rows.good() for name in row if name != column}
    return Features(dict.fromkeys(names, Json()))


def _with_prompt(chosen: str | list, rejected: str | list) -> dict[str, Any]:
    """What both begin with is the prompt, as for TRL; a space before the answers is theirs."""
    shorter = min(len(chosen), len(rejected))
    common = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if common == shorter:
        raise BadRow("one of chosen and rejected is what the other begins with, and there is no column 'prompt'")
    if isinstance(chosen, str) and chosen[:common].endswith(" "):
        common -= 1
    if common == 0:
        raise BadRow("chosen and rejected begin differently, and there is no column 'prompt'")
    return {"prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}
