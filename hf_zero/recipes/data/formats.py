"""What the columns of a row mean for `sft` and `pretrain`, and how they become what TRL takes.

| format | columns | becomes |
|---|---|---|
| `text` | `text` | the same |
| `messages` | `messages`: a list of `{"role": ..., "content": ...}` | the same |
| `conversations` | ShareGPT's list of `{"from": ..., "value": ...}`, and `system` if there is one | `messages` |
| `prompt` | `prompt` and `completion`, both texts or both lists of messages | the same |
| `alpaca` | `instruction`, `output`, and `input` and `system` if there are such | `prompt`, `completion` |

Messages may call tools, whose descriptions are in the column `tools`: a list, or JSON of one.
"""

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Features, Json, Value

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import BadRow, Rows, text_of


Message = dict[str, Any]

TEXT_COLUMN = "text"  # unless another is named
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names for them
NUM_WORDS = 5  # of a text that serve as a prompt


@dataclass(frozen=True)
class Format:
    """What columns make a row of this kind, and how.

    Args:
        name (`str`): as in the table above.
        columns (`tuple[str, ...]`): those that it takes.
        gives (`tuple[str, ...]`): those that TRL gets.
        convert (`Callable`): gives their values, by a row and whether it holds messages; raises [`BadRow`].
        counts (`str`, *optional*): what the loss counts alone unless told otherwise: "completion", "assistant".
        is_chat (`bool`): whether rows hold messages, and not texts.
    """

    name: str
    columns: tuple[str, ...]
    gives: tuple[str, ...]
    convert: Callable[[dict[str, Any], bool], dict[str, Any]] = field(repr=False)
    counts: str | None = None
    is_chat: bool = True

    @property
    def features(self) -> Features:
        """What `read` gives."""
        if self.is_chat:
            return Features(dict.fromkeys((*self.gives, "tools"), Json()))
        return Features(dict.fromkeys(self.gives, Value("string")))

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes what TRL takes of a row.

        Raises:
            BadRow: something is missing, or not what the other rows have.
        """
        for column in self.columns:
            if row.get(column) is None:
                raise BadRow(f"nothing in column {column!r}")
        values = self.convert(row, self.is_chat)
        return {**values, "tools": _tools(row)} if self.is_chat else values

    def chat_of(self, row: dict[str, Any]) -> list[Message] | None:
        """The conversation that a row which was read holds; `None` where rows are texts."""
        return [turn for column in self.gives for turn in row[column]] if self.is_chat else None

    def prompt_of(self, row: dict[str, Any]) -> str | list[Message]:
        """What to try the model on, of a row which was read: what comes before the first answer, or a few words."""
        if not self.is_chat:
            return row[self.gives[0]] if len(self.gives) > 1 else " ".join(row[self.gives[0]].split()[:NUM_WORDS])
        said = [turn["content"] for turn in self.chat_of(row) or () if turn["role"] == "user"]
        texts = [textwrap.shorten(text, 60, placeholder="") for text in said[:1] if isinstance(text, str)]
        return [{"role": "user", "content": text} for text in texts] or ""


def _messages(row: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    return {"messages": _chat(row["messages"], "messages")}


def _conversations(row: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    turns = row["conversations"]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        turns = [_renamed(turn) for turn in turns]
    return {"messages": _system(row) + _chat(turns, "conversations")}


def _prompt(row: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    if is_chat:
        return {column: _chat(row[column], column) for column in ("prompt", "completion")}
    prompt = row["prompt"] and text_of(row["prompt"], "prompt")
    return {"prompt": prompt, "completion": text_of(row["completion"], "completion")}


def _alpaca(row: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    question = text_of(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + text_of(row["input"], "input")
    prompt = [*_system(row), {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": text_of(row["output"], "output")}]}


FORMATS = (
    Format("messages", ("messages",), ("messages",), _messages, "assistant"),
    Format("conversations", ("conversations",), ("messages",), _conversations, "assistant"),
    Format("prompt", ("prompt", "completion"), ("prompt", "completion"), _prompt, "completion"),
    Format("alpaca", ("instruction", "output"), ("prompt", "completion"), _alpaca, "completion"),
)
FORMAT_NAMES = ("text", *(form.name for form in FORMATS))


def text_format(column: str) -> Format:
    """The format whose rows are texts.

    Args:
        column (`str`): where they are.
    """

    def convert(row: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        return {column: text_of(row[column], column)}

    return Format("text", (column,), (column,), convert, is_chat=False)


def recognise(rows: Rows, name: str | None, text_column: str) -> Format:
    """Finds the format of rows by their columns; the first row says whether those hold texts or messages.

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
        holds_texts = fits[0].name == "prompt" and isinstance(rows.example["completion"], str)
        return replace(fits[0], is_chat=False) if holds_texts else fits[0]
    found = f"{rows.source}: columns found {rows.columns}"
    if fits:
        names = " and ".join(form.name for form in fits)
        raise DataError(f"{found}, which fit the formats {names}; choose one with --dataset_format")
    expected = ", or ".join(" and ".join(form.columns) for form in formats)
    raise DataError(f"{found}, expected {expected}; rename them, or name the one of texts with --dataset_text_field")


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
