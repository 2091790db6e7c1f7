"""Labelled texts, and the split that depends on nothing but the text itself."""

import hashlib
from collections.abc import Iterable
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


def is_test_text(text: str) -> bool:
    """Says on which side of the train/test split a text lies.

    Args:
        text (`str`): The text of an example.

    Returns:
        `bool`: True for about 20 % of all texts, and always the same for equal texts.
    """
    return int(text_hash(text)[:8], 16) % 100 < TEST_PERCENT


def split_by_hash(examples: Iterable[Example]) -> tuple[list[Example], list[Example]]:
    """Splits examples so that equal texts never land on both sides.

    Args:
        examples (`Iterable[Example]`): The whole data set.

    Returns:
        `tuple[list[Example], list[Example]]`: Training and test examples, each in the order given.
    """
    train: list[Example] = []
    test: list[Example] = []
    for example in examples:
        (test if is_test_text(example.text) else train).append(example)
    return train, test
