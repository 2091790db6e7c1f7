"""Rows of answers and of prompts, as TRL's trainers take them: texts, or lists of messages.

| format | columns |
|---|---|
| `PREFERENCES` | `chosen` and `rejected`, and `prompt`, ShareGPT's `conversations`, or a common beginning |
| `JUDGED` | `prompt`, `completion`, and `label`: whether the completion is good |
| `PROMPTS` | `prompt`; other columns are kept for reward functions |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Features, Json, List, Value

from hf_zero.errors import DataError
from hf_zero.recipes.data.formats import TEMPLATE_KWARGS, WEIGHT, Format, Message, chat_in, system_of
from hf_zero.recipes.data.rows import CONTENT, BadRow, Rows, text_of


ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)
_MESSAGES = List({"role": Value("string"), "content": Value("string")})


@dataclass(frozen=True)
class Answers(Format):
    """A format of prompts, perhaps with answers: texts, or messages of texts that call no tools."""

    asks: tuple[str, ...] = ()  # the columns of one conversation
    takes_settings: bool = True  # whether chats have settings for the template; other trainers have one for all rows
    others: Features = field(default_factory=Features)  # further columns that are kept

    @property
    def features(self) -> Features:
        """The columns that `read` returns."""
        settings = {TEMPLATE_KWARGS: Json()} if self.is_chat and self.takes_settings else {}
        kind = _MESSAGES if self.is_chat else Value("string")
        return Features({**dict.fromkeys(self.gives, kind), **settings, **self.others})

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Converts a row. Raises [`BadRow`] as `Format.read` does, and for tools."""
        if row.get("tools"):
            raise BadRow("column 'tools' holds tools, which are not supported")
        values = {**row, **super().read(row)}
        return {name: values.get(name) for name in self.features}

    def chat_of(self, values: dict[str, Any]) -> list[Message] | None:
        return [turn for column in self.asks for turn in values[column]] if self.is_chat else None


def _given(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    check = _chat if form.is_chat else lambda value, column, form: text_of(value, column)
    return {column: check(row[column], column, form) for column in form.gives if row.get(column) is not None}


def _chat(turns: Any, column: str, form: Answers) -> list[Message]:
    messages = chat_in(turns, column, form)
    for number, message in enumerate(messages, start=1):
        if message.get("tool_calls"):
            raise BadRow(f"message {number} of column {column!r} calls tools, which is not supported")
        if WEIGHT in message:
            raise BadRow(f"message {number} of column {column!r} has weight 0, which only sft honours")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _preference(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    prompt = row.get("prompt")
    if form.is_chat:  # ShareGPT's answers are one message each
        row = {**row, **{name: [row[name]] for name in ANSWERS if isinstance(row[name], dict)}}
        if "conversations" in form.columns:
            turns = row["conversations"]
            row["prompt"] = system_of(row) + turns if isinstance(turns, list) else turns
        elif isinstance(prompt, str):
            return _asked_in_text(_given(form, {**row, "prompt": None}), text_of(prompt, "prompt"))
    values = _given(form, row)
    return values if "prompt" in values else _with_prompt(values["chosen"], values["rejected"])


def _asked_in_text(values: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Converts messages whose prompt is a text: answers alone, or, as in UltraFeedback, conversations that begin with
    it."""
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return {"prompt": [{"role": "user", "content": prompt}], **values}
    values = _with_prompt(chosen, rejected)
    if not any(turn["content"].strip() == prompt.strip() for turn in values["prompt"]):
        raise BadRow("column 'prompt' holds a text that no message has with which chosen and rejected begin")
    return values


def _with_prompt(chosen: str | list, rejected: str | list) -> dict[str, Any]:
    """Takes the common beginning of both answers as the prompt, as TRL does."""
    from trl import extract_prompt

    shorter = min(len(chosen), len(rejected))
    if chosen[:shorter] == rejected[:shorter]:
        raise BadRow("one of chosen and rejected is what the other begins with, and there is no column 'prompt'")
    values = extract_prompt({"chosen": chosen, "rejected": rejected}) if chosen[0] == rejected[0] else {}
    if not values.get("prompt"):
        raise BadRow("chosen and rejected begin differently, and there is no column 'prompt'")
    return values


def _judged(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    label = row["label"]
    if isinstance(label, str):  # of a table
        label = {"true": True, "false": False}.get(label.strip().lower(), label)
    if not isinstance(label, bool):
        raise BadRow(f"column 'label' holds {label!r}, expected true or false")
    return {**_given(form, row), "label": label}


PREFERENCES = Answers("preferences", ANSWERS, COLUMNS, _preference, asks=("prompt", "chosen"))
_PAIR, _LABEL = ("prompt", "completion"), Features({"label": Value("bool")})
JUDGED = Answers("judged", (*_PAIR, *_LABEL), _PAIR, _judged, asks=_PAIR, others=_LABEL)
PROMPTS = Answers("prompts", ("prompt",), ("prompt",), _given, asks=("prompt",), takes_settings=False)


def format_of(formats: Sequence[Answers], rows: Rows) -> Answers:
    """Returns the first of several formats whose columns the rows have, for texts or chats as in the first row. Raises
    [`DataError`] if a column is missing."""
    if len(formats) == 1:
        rows.require(formats[0].columns)
    form = next((each for each in formats if set(each.columns) <= set(rows.columns)), None)
    if form is None:
        expected = ", or ".join(" and ".join(each.columns) for each in formats)
        raise DataError(f"{rows.source}: columns found {rows.columns}, expected {expected}; rename them")
    if form is PREFERENCES:
        asked = next((name for name in ("prompt", "conversations") if name in rows.columns), None)
        form = replace(form, columns=(asked, *ANSWERS) if asked else ANSWERS)
    if form is PROMPTS:
        form = replace(form, others=_features_beside(rows, "prompt"))
    return replace(form, is_chat=isinstance(rows.example[form.asks[-1]], list | dict))


def _features_beside(rows: Rows, column: str) -> Features:
    """Returns the features of all columns but one. Those of local files may hold any JSON."""
    found = rows.data.features
    if found is None or CONTENT in found:
        found = dict.fromkeys(name for row in rows.good() for name in row)
        return Features({name: Json() for name in found if name != column})
    return Features({name: kind for name, kind in found.items() if name != column})
