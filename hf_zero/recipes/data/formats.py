"""What the columns of a row mean.

| format | columns |
|---|---|
| `text` | `text` |
| `messages` | `messages`: a list of `{"role": ..., "content": ...}` |
| `conversations` | ShareGPT's `conversations`: a list of `{"from": ..., "value": ...}`, and `system` if there is one |
| `prompt` | `prompt` and `completion`, both texts or both lists of messages |
| `alpaca` | `instruction`, `output`, and `input` and `system` if there are such |

Messages may call tools, whose descriptions are in the column `tools`: a list, or JSON of one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import BadRow, Rows, text_of


Message = dict[str, Any]

TEXT_COLUMN = "text"  # unless another is named
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names for them


@dataclass(frozen=True)
class Sample:
    """One row in the one form that all formats come to.

    Args:
        prompt (`str` or `list[Message]`, *optional*): what the model is given; `None` where the format has none.
        completion (`str` or `list[Message]`): what it is to say, or all of it.
        tools (`list`, *optional*): for the chat template.
    """

    prompt: str | list[Message] | None
    completion: str | list[Message]
    tools: list | None = None

    @property
    def messages(self) -> list[Message]:
        """All of a chat."""
        return cast(list[Message], [*(self.prompt or ()), *self.completion])

    @property
    def is_chat(self) -> bool:
        return isinstance(self.completion, list)


@dataclass(frozen=True)
class Format:
    """What columns make a row of this kind, and how.

    Args:
        name (`str`): as in the table above.
        columns (`tuple[str, ...]`): those that it takes.
        read (`Callable`): makes a [`Sample`] of a row, or raises [`BadRow`].
        counts (`str`, *optional*): what the loss counts alone unless told otherwise: "completion", "assistant".
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[dict[str, Any]], Sample] = field(repr=False)
    counts: str | None = None

    def is_chat(self, row: dict[str, Any]) -> bool:
        """Whether a row holds messages; one that cannot be read has its place in the data set's check."""
        try:
            return self.read(row).is_chat
        except BadRow:
            return self.counts is not None


def _messages(row: dict[str, Any]) -> Sample:
    return Sample(None, _chat(row["messages"], "messages"), _tools(row))


def _conversations(row: dict[str, Any]) -> Sample:
    turns = row["conversations"]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        turns = [_renamed(turn) for turn in turns]
    return Sample(None, _system(row) + _chat(turns, "conversations"), _tools(row))


def _prompt(row: dict[str, Any]) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Sample(prompt, text_of(completion, "completion"))
    return Sample(_chat(prompt, "prompt"), _chat(completion, "completion"), _tools(row))


def _alpaca(row: dict[str, Any]) -> Sample:
    question = text_of(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + text_of(row["input"], "input")
    prompt = [*_system(row), {"role": "user", "content": question}]
    return Sample(prompt, [{"role": "assistant", "content": text_of(row["output"], "output")}])


FORMATS = (
    Format("messages", ("messages",), _messages, "assistant"),
    Format("conversations", ("conversations",), _conversations, "assistant"),
    Format("prompt", ("prompt", "completion"), _prompt, "completion"),
    Format("alpaca", ("instruction", "output"), _alpaca, "completion"),
)
FORMAT_NAMES = ("text", *(form.name for form in FORMATS))


def text_format(column: str) -> Format:
    """The format whose rows are texts.

    Args:
        column (`str`): where they are.
    """
    return Format("text", (column,), lambda row: Sample(None, text_of(row[column], column)))


def recognise(rows: Rows, name: str | None, text_column: str) -> Format:
    """Finds the format of rows by their columns.

    Args:
        rows ([`Rows`]): from [`load_rows`].
        name (`str`, *optional*): one of `FORMAT_NAMES`, if the user says it.
        text_column (`str`): the column of the format `text`.

    Raises:
        ConfigError: a column of texts is named, and rows are something else.
        DataError: the columns fit none, or several, or not the one that was named.
    """
    formats = [form for form in (text_format(text_column), *FORMATS) if name in (None, form.name)]
    fits = [form for form in formats if set(form.columns) <= set(rows.columns)]
    if len(fits) == 1:
        if fits[0].name != "text" and text_column != TEXT_COLUMN:
            form = f"{rows.source} has rows of the format {fits[0].name}"
            raise ConfigError(f"dataset_text_field {text_column!r}: {form}; leave it out")
        return _checked(fits[0])
    found = f"{rows.source}: columns found {rows.columns}"
    if fits:
        names = " and ".join(form.name for form in fits)
        raise DataError(f"{found}, which fit the formats {names}; choose one with --dataset_format")
    expected = ", or ".join(" and ".join(form.columns) for form in formats)
    raise DataError(f"{found}, expected {expected}; rename them, or name the one of texts with --dataset_text_field")


def _checked(form: Format) -> Format:
    """The same, for rows that may lack its columns."""

    def read(row: dict[str, Any]) -> Sample:
        for column in form.columns:
            if row.get(column) is None:
                raise BadRow(f"nothing in column {column!r}")
        return form.read(row)

    return replace(form, read=read)


def _chat(turns: Any, column: str) -> list[Message]:
    if not isinstance(turns, list):
        raise BadRow(f"column {column!r} holds a {type(turns).__name__}, expected a list of messages")
    if not turns:
        raise BadRow(f"nothing in column {column!r}")
    return [_message(turn, f"message {number} of column {column!r}") for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is a {type(turn).__name__}, expected role and content")
    if not isinstance(turn.get("role"), str):
        raise BadRow(f"{where} has keys {list(turn)}, expected role and content")
    if not isinstance(turn.get("content"), str | list) and not turn.get("tool_calls"):
        raise BadRow(f"{where} has no content")
    # Arrow gives every message the keys of all of them
    return {key: value for key, value in turn.items() if value is not None or key == "content"}


def _renamed(turn: Message) -> Message:
    if "from" not in turn:
        return turn
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _system(row: dict[str, Any]) -> list[Message]:
    return [{"role": "system", "content": text_of(row["system"], "system")}] if row.get("system") else []


def _tools(row: dict[str, Any]) -> list | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRow(f"column 'tools' holds no JSON ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"column 'tools' holds a {type(tools).__name__}, expected a list")
    return tools or None
