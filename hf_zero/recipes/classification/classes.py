"""The classes of a data set: their names, and the number that a label stands for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel

from hf_zero.recipes.data.rows import BadRow


@dataclass(frozen=True)
class Classes:
    """Which classes there are.

    Args:
        names (`list[str]`): By number, as the model's config will have them.
        number_of (`dict[str, int]`): Of each label, as [`label_of`] gives it.
    """

    names: list[str]
    number_of: dict[str, int]

    @classmethod
    def of_feature(cls, feature: Any) -> "Classes | None":
        """Those that a data set declares for its column (`datasets.ClassLabel`), where it does."""
        if not isinstance(feature, ClassLabel):
            return None
        return cls(list(feature.names), {str(number): number for number in range(feature.num_classes)})

    @classmethod
    def of_labels(cls, labels: Iterable[str]) -> "Classes":
        """Those that are found: whole numbers in their order, anything else in that of the alphabet."""
        found = set(labels)
        are_numbers = all(label.removeprefix("-").isdecimal() for label in found)
        names = sorted(found, key=int if are_numbers else None)
        return cls(names, {name: number for number, name in enumerate(names)})

    def numbers(self, labels: Iterable[str]) -> list[int]:
        """The numbers of known labels."""
        return [self.number_of[label] for label in labels]

    def name_of(self, label: str) -> str:
        """The class that a known label stands for."""
        return self.names[self.number_of[label]]

    def unknown(self, label: str) -> BadRow:
        """What to say of a label that is not among them."""
        known = list(self.number_of)
        shown = ", ".join(known) if len(known) <= 10 else f"{len(known)} classes, {known[0]} to {known[-1]}"
        return BadRow(f"class {label!r} is none of the training rows' or of the data set's: {shown}")


def label_of(value: Any, column: str) -> str:
    """The label in a cell, whatever its type.

    Raises:
        BadRow: there is none, or something that names no class.
    """
    if value is None or value == "":
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(value, (str, int)):
        raise BadRow(f"a {type(value).__name__} in column {column!r}, expected a text or a whole number")
    return str(value)
