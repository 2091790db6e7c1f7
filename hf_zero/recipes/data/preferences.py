"""Rows of answers and of prompts, as TRL's trainers take them: texts, or lists of messages.

| class | columns |
|---|---|
| `Preferences` | `chosen` and `rejected`, and `prompt` or what both begin with |
| `Judged` | `prompt`, `completion`, and `label`: whether the completion is good |
| `Prompts` | `prompt`; other columns are kept, for functions that judge what is generated |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from datasets import Features, List, Value
from datasets.features.features import get_nested_type

from hf_zero.errors import DataError
from hf_zero.recipes.data.formats import chat_in
from hf_zero.recipes.data.rows import BadRow, Rows, text_of


ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)
_MESSAGES = List({"role": Value("string"), "content": Value("string")})


@dataclass(frozen=True)
class Answers:
    """How rows of one data set are read. The first row says whether they are chats."""

    columns: tuple[str, ...]  # those columns of texts or messages that the rows have
    is_chat: bool  # whether these hold lists of messages, and not texts
    others: Features = field(default_factory=Features)  # further columns that are kept

    REQUIRED: ClassVar[tuple[str, ...]]
    SHOWN: ClassVar[tuple[str, ...]]  # what one conversation consists of

    @classmethod
    def of(cls, rows: Rows) -> "Answers":
        """How these rows are read. Raises [`DataError`] where a column is missing."""
        rows.require(cls.REQUIRED)
        return cls(cls.SHOWN, isinstance(rows.example[cls.SHOWN[-1]], list))

    @property
    def features(self) -> Features:
        """What `read` gives."""
        return Features({**dict.fromkeys(self.columns, _MESSAGES if self.is_chat else Value("string")), **self.others})

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Makes what the trainer takes of a row. Raises [`BadRow`] where something is missing, or not what the other
        rows have."""
        if row.get("tools"):
            raise BadRow("column 'tools' holds tools, which are not supported")
        check = _chat if self.is_chat else text_of
        return {column: check(row.get(column), column) for column in self.columns}

    def chat_of(self, row: Mapping[str, Any]) -> list[dict[str, str]] | None:
        """The conversation that a row which was read holds; `None` where rows are texts."""
        return [message for column in self.SHOWN for message in row[column]] if self.is_chat else None

    def prompt_of(self, row: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """What to try the model on, of a row which was read."""
        return row["prompt"]


class Preferences(Answers):
    """A prompt, an answer that was chosen and one that was rejected."""

    REQUIRED = ANSWERS
    SHOWN = ("prompt", "chosen")

    @classmethod
    def of(cls, rows: Rows) -> "Preferences":
        """How these rows are read. Without a prompt, what the two answers begin with alike is it."""
        rows.require(cls.REQUIRED)
        return cls(COLUMNS if "prompt" in rows.columns else ANSWERS, isinstance(rows.example["chosen"], list))

    @property
    def features(self) -> Features:
        return Features(dict.fromkeys(COLUMNS, _MESSAGES if self.is_chat else Value("string")))

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(row)
        return values if "prompt" in values else _with_prompt(values["chosen"], values["rejected"])


class Judged(Answers):
    """A prompt, a completion, and whether it is good."""

    REQUIRED = ("prompt", "completion", "label")
    SHOWN = ("prompt", "completion")

    @classmethod
    def of(cls, rows: Rows) -> "Judged":
        made = super().of(rows)
        return cls(made.columns, made.is_chat, Features({"label": Value("bool")}))

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(label := row.get("label"), bool):
            raise BadRow(f"column 'label' holds {label!r}, expected true or false")
        return {**super().read(row), "label": label}


class Prompts(Answers):
    """A prompt; the model generates the answers. Other columns come to the functions that judge them."""

    REQUIRED = SHOWN = ("prompt",)

    @classmethod
    def of(cls, rows: Rows) -> "Prompts":
        made = super().of(rows)
        return cls(made.columns, made.is_chat, _features_beside(rows, "prompt"))

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(row)
        for name, feature in self.others.items():
            values[name] = row.get(name)
            if not _fits(values[name], feature):
                raise BadRow(f"column {name!r} holds a {type(values[name]).__name__}, other rows something else")
        return values


def format_of(formats: tuple[type[Answers], ...], rows: Rows) -> Answers:
    """How rows are read: by the first of several formats all of whose columns they have."""
    for kind in formats:
        if set(kind.REQUIRED) <= set(rows.columns):
            return kind.of(rows)
    if len(formats) == 1:
        return formats[0].of(rows)
    expected = ", or ".join(" and ".join(kind.REQUIRED) for kind in formats)
    raise DataError(f"{rows.source}: columns found {rows.columns}, expected {expected}; rename them")


def _features_beside(rows: Rows, column: str) -> Features:
    """The kinds of all columns but one. Of lines of JSON they are those that all rows have in common: a column may be
    empty at first. Where they have none in common the first row says what is expected."""
    if rows.form == "columns":
        return Features({name: kind for name, kind in rows.data.features.items() if name != column})
    found = []
    for raw in rows.data:
        try:
            row = rows.read(raw)
        except BadRow:  # it is told, or left out, when the rows are encoded
            continue
        if row is not None:
            found.append({name: value for name, value in row.items() if name != column})
    names = {name: None for row in found for name in row}
    columns = {name: _array([row.get(name) for row in found]) for name in names}
    return Features.from_arrow_schema(pa.table(columns).schema) if columns else Features()


def _array(values: list) -> pa.Array:
    try:
        return pa.array(values)
    except (ValueError, TypeError):  # those of pyarrow are such
        return pa.array([next(value for value in values if value is not None)])


def _fits(value: Any, feature: Any) -> bool:
    """Whether Arrow takes a value into a column of this kind, and loses nothing."""
    kind = get_nested_type(feature)
    try:
        pa.array([value], kind)
        pa.array([value]).cast(kind, safe=True)
    except (ValueError, TypeError):
        return False
    return True


def _chat(value: Any, column: str) -> list[dict[str, str]]:
    messages = chat_in(value, column)
    for number, message in enumerate(messages, start=1):
        if message.get("tool_calls"):
            raise BadRow(f"message {number} of column {column!r} calls tools, which is not supported")
        if not isinstance(message["content"], str):
            raise BadRow(f"message {number} of column {column!r} has a content of blocks, expected a text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


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
