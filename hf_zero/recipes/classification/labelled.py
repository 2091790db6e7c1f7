"""Rows with a class each, which are examined one by one before the training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import ClassLabel, Dataset

from hf_zero.errors import DataError
from hf_zero.recipes.classification.inputs import Images, Texts
from hf_zero.recipes.data.rows import BadRow, Rows, plural
from hf_zero.recipes.docstrings import is_test_hash


@dataclass(frozen=True)
class Classes:
    """The classes of a data set."""

    names: list[str]  # by number, as the model's config will have them
    number_of: dict[str, int]  # of each label, as [`_label_of`] gives it

    @classmethod
    def of_feature(cls, feature: Any) -> "Classes | None":
        """Returns the classes that a data set declares for its column (`datasets.ClassLabel`); `None` where it
        declares none."""
        if not isinstance(feature, ClassLabel):
            return None
        return cls(list(feature.names), {str(number): number for number in range(feature.num_classes)})

    @classmethod
    def of_labels(cls, labels: Iterable[str]) -> "Classes":
        """Makes the classes of the labels that are found, whole numbers in their order and all others
        alphabetically."""
        found = set(labels)
        are_numbers = all(label.removeprefix("-").isdecimal() for label in found)
        names = sorted(found, key=int if are_numbers else None)
        return cls(names, {name: number for number, name in enumerate(names)})

    def numbers(self, labels: Iterable[str]) -> list[int]:
        """Returns the numbers of known labels."""
        return [self.number_of[label] for label in labels]

    def name_of(self, label: str) -> str:
        """Returns the class of a known label."""
        return self.names[self.number_of[label]]

    def unknown(self, label: str) -> BadRow:
        """Returns the message for a label that is not among the classes."""
        known = list(self.number_of)
        shown = ", ".join(known) if len(known) <= 10 else f"{len(known)} classes, {known[0]} to {known[-1]}"
        return BadRow(f"class {label!r} is none of the training rows' or of the data set's: {shown}")


def _label_of(value: Any, column: str) -> str:
    """Returns the label in a cell of any type; raises [`BadRow`] where it names no class."""
    if value is None or value == "":
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(value, (str, int)):
        raise BadRow(f"a {type(value).__name__} in column {column!r}, expected a text or a whole number")
    return str(value)


@dataclass
class BadRows:
    """Counts bad rows that are left out, or ends the run at the first one."""

    are_skipped: bool  # and counted; otherwise the first one ends the run
    count: int = 0  # how many so far
    first: str = ""  # the first one, and what is wrong with it

    def add(self, where: str, error: BadRow) -> None:
        """Adds a bad row. Raises [`DataError`], naming it, unless bad rows are left out."""
        message = f"{where}: {error}"
        if not self.are_skipped:
            raise DataError(f"{message}; correct it, or leave such rows out with --skip_bad_rows")
        self.first = self.first or message
        self.count += 1

    def notes(self) -> list[str]:
        """Returns a line about the bad rows, or none."""
        return [f"{plural(self.count, 'bad row')} left out, the first: {self.first}"] if self.count else []


@dataclass(frozen=True)
class Labelled:
    """Rows that can be used for training, and the label of each."""

    data: Dataset  # the columns that are classified, as [`Texts`] or [`Images`] take them
    labels: list[str]  # one for each row
    source: Rows
    indices: list[int]  # which rows of the source they are

    @classmethod
    def examine(cls, rows: Rows, inputs: Texts | Images, label_column: str, bad: BadRows) -> "Labelled":
        """Reads all rows and keeps the good ones. Raises [`DataError`] where one is bad and bad rows are not
        left out."""
        is_table = rows.form == "columns"
        data = rows.data.select_columns([*inputs.columns, label_column]) if is_table else rows.data
        taken, labels, indices = [], [], []
        for index, raw in enumerate(data):
            try:
                row = rows.read(raw)
                if row is None:
                    continue
                values, label = inputs.take(row), _label_of(row.get(label_column), label_column)
            except BadRow as error:
                bad.add(rows.where(index), error)
                continue
            labels.append(label)
            indices.append(index)
            if not is_table:
                taken.append(values)
        if is_table:
            data = data.select_columns(list(inputs.columns)).select(indices)
        else:
            data = Dataset.from_list(taken)
        return cls(data, labels, rows, indices)

    def __len__(self) -> int:
        return len(self.labels)

    def halves(self, inputs: Texts | Images) -> tuple["Labelled", "Labelled"]:
        """Splits rows so that equal ones never land on both sides: about 80 % to train on, 20 % to test on."""
        is_test = [is_test_hash(inputs.hash(row)) for row in self.data]
        return self._at([not test for test in is_test]), self._at(is_test)

    def first(self, num_rows: int | None) -> "Labelled":
        """Returns the first `num_rows` rows, or all of them for `None`."""
        return self._at([position < (num_rows or len(self)) for position in range(len(self))])

    def known(self, classes: Classes, bad: BadRows) -> "Labelled":
        """Returns the rows whose labels name a class. Raises [`DataError`] where one does not and bad rows are not
        left out."""
        are_known = []
        for index, label in zip(self.indices, self.labels, strict=True):
            are_known.append(label in classes.number_of)
            if not are_known[-1]:
                bad.add(self.source.where(index), classes.unknown(label))
        return self._at(are_known)

    def _at(self, are_kept: Sequence[bool]) -> "Labelled":
        if all(are_kept):
            return self
        kept = [position for position, is_kept in enumerate(are_kept) if is_kept]
        return replace(
            self,
            data=self.data.select(kept),
            labels=[self.labels[position] for position in kept],
            indices=[self.indices[position] for position in kept],
        )
