"""Rows of preferences: a prompt, an answer that was chosen and one that was rejected."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Features, List, Value

from hf_zero.recipes.data.rows import BadRow, Rows, text_of


ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)


@dataclass(frozen=True)
class Preferences:
    """How rows of one data set become `prompt`, `chosen` and `rejected`.

    Args:
        columns (`tuple[str, ...]`): those of the three that the rows have. Without a prompt, what the two answers
            begin with alike is it.
        is_chat (`bool`): whether they are lists of messages, and not texts.
    """

    columns: tuple[str, ...]
    is_chat: bool

    @classmethod
    def of(cls, rows: Rows) -> "Preferences":
        """How these rows are read: the first one says whether they are chats.

        Raises:
            DataError: a column is missing.
        """
        rows.require(ANSWERS)
        columns = tuple(column for column in COLUMNS if column in rows.columns)
        return cls(columns, isinstance(rows.example["chosen"], list))

    @property
    def features(self) -> Features:
        """What `read` gives."""
        kind = List({"role": Value("string"), "content": Value("string")}) if self.is_chat else Value("string")
        return Features(dict.fromkeys(COLUMNS, kind))

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a prompt and two answers of a row.

        Raises:
            BadRow: something is missing, or not what the other rows have.
        """
        if row.get("tools"):
            raise BadRow("column 'tools' holds tools, which are not supported")
        check = _chat if self.is_chat else text_of
        values = {column: check(row.get(column), column) for column in self.columns}
        if "prompt" in values:
            return values
        return _with_prompt(values["chosen"], values["rejected"])


def _chat(value: Any, column: str) -> list[dict[str, str]]:
    if value is None or value == []:
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(value, list):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a list of messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRow(f"message {number} of column {column!r} is not a role and a content, both texts")
        if message.get("tool_calls"):
            raise BadRow(f"message {number} of column {column!r} calls tools, which is not supported")
    return [{"role": message["role"], "content": message["content"]} for message in value]


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
