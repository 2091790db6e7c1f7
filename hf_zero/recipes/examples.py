"""Labelled texts, and the split that depends on nothing but what is classified."""

import hashlib
from dataclasses import dataclass


TEST_PERCENT = 20


@dataclass(frozen=True)
class Example:
    """One text and the class it belongs to.

    Args:
        text (`str`): What the model reads.
        label (`str`): The name of the class.
    """

    text: str
    label: str


def text_hash(text: str) -> str:
    """Gives the SHA-256 of a text, in hex: the order and the split of a data set rest on it.

    Args:
        text (`str`): Any text.

    Returns:
        `str`: 64 hexadecimal digits, the same on every machine.
    """
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def is_test_hash(digest: str) -> bool:
    """Says on which side of the train/test split a row lies.

    Args:
        digest (`str`): The SHA-256 of what is classified, in hex.

    Returns:
        `bool`: True for about 20 % of all rows, and always the same for equal ones.
    """
    return int(digest[:8], 16) % 100 < TEST_PERCENT
