"""The rows of a classifier: texts, pairs of texts, or images, each with a class, examined before the training."""

import hashlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import BatchEncoding

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.images import check_image, check_pillow, decoded
from hf_zero.recipes.data.rows import BadRow, Rows, cut_notes, encode_rows, text_of
from hf_zero.recipes.docstrings import is_test_hash, text_hash
from hf_zero.recipes.loading import load_tokenizer, loaded


class Texts:
    """Reads and tokenizes the texts of one or two columns for a model. Longer ones are cut to `max_length` tokens."""

    task = "text-classification"
    auto_class = AutoModelForSequenceClassification
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = "SEQ_CLS"

    columns: tuple[str, ...]
    processor: PreTrainedTokenizerBase  # from `load_processor` on

    def __init__(self, columns: Sequence[str], max_length: int):
        self.columns, self._max_length = tuple(columns), max_length
        self.features = dict.fromkeys(columns, Value("string"))
        self._lost: list[int] = []  # how many tokens each row lost that is as long as can be

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the tokenizer of a model. Raises [`ConfigError`] where it does not load, or cannot pad."""
        tokenizer = load_tokenizer(path, **where)
        if tokenizer.pad_token is None:
            raise ConfigError(f"{path}: its tokenizer has no token to pad with; set pad_token and save it again")
        self.processor = tokenizer

    def take(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Returns the texts of a row. Raises [`BadRow`] where a text is missing, or is none."""
        return {column: text_of(row.get(column), column) for column in self.columns}

    def hash(self, row: Mapping[str, Any]) -> str:
        """Returns the hash that decides on which side of a split a row lies."""
        return text_hash(row[self.columns[0]])

    def prepare(self, data: Dataset, numbers: Sequence[int]) -> Dataset:
        """Tokenizes rows; `numbers` are those of their classes."""
        tokens = self._tokens(data)
        full = [row for row, ids in enumerate(tokens["input_ids"]) if len(ids) >= self._max_length]
        if full:
            whole = self.processor(*self._texts(data.select(full)), verbose=False)["input_ids"]
            self._lost += [len(ids) - self._max_length for ids in whole]
        columns = {name: ids for name, ids in tokens.items() if name in self.processor.model_input_names}
        return Dataset.from_dict({**columns, "labels": list(numbers)})

    def notes(self) -> list[str]:
        """Returns a line that says how many texts were cut, or none."""
        return cut_notes(self._lost, self._max_length)

    def batch(self, data: Dataset) -> BatchEncoding:
        """Returns rows as a model takes them for a prediction."""
        return self._tokens(data, padding=True, return_tensors="pt")

    def shown(self, row: Mapping[str, Any]) -> str | dict[str, str]:
        """Returns a row as the pipeline of transformers takes it, short enough for a command line."""
        texts = [textwrap.shorten(row[column], 60, placeholder="") for column in self.columns]
        return texts[0] if len(texts) == 1 else dict(zip(("text", "text_pair"), texts))

    def _texts(self, data: Dataset) -> list[list[str]]:
        return [list(data[column]) for column in self.columns]

    def _tokens(self, data: Dataset, **settings: Any) -> BatchEncoding:
        return self.processor(*self._texts(data), truncation=True, max_length=self._max_length, **settings)


class Images:
    """Reads and prepares images for a model. Raises [`ConfigError`] where Pillow is not installed."""

    task = "image-classification"
    auto_class = AutoModelForImageClassification
    classifiers = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = None

    columns: tuple[str, ...]
    processor: Any  # from `load_processor` on

    def __init__(self, column: str):
        check_pillow()
        self.columns, self.features = (column,), {column: Image(decode=False)}

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the image processor of a model. Raises [`ConfigError`] where it does not load."""
        with loaded(path, "its image processor does not load"):
            self.processor = AutoImageProcessor.from_pretrained(path, **where)

    def take(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is classified of a row. Raises [`BadRow`] where it is missing, or none of its kind."""
        (column,) = self.columns
        stored = row.get(column)
        if stored is None:
            raise BadRow(f"nothing in column {column!r}")
        if not isinstance(stored, Mapping):
            raise BadRow(f"a {type(stored).__name__} in column {column!r}, expected an image")
        check_image(stored, column)
        return {column: {"bytes": stored.get("bytes"), "path": stored.get("path")}}

    def hash(self, row: Mapping[str, Any]) -> str:
        """Returns the hash that decides on which side of a split a row lies."""
        stored = row[self.columns[0]]
        content = stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"]).read_bytes()
        return hashlib.sha256(content).hexdigest()

    def prepare(self, data: datasets.Dataset, numbers: Sequence[int]) -> "Pixels":
        """Returns rows that become pixels when they are read; `numbers` are those of their classes."""
        return Pixels(data, self.columns[0], numbers, self.processor)

    def notes(self) -> list[str]:
        """Returns no lines, since no image is cut."""
        return []

    def batch(self, data: datasets.Dataset) -> dict[str, torch.Tensor]:
        """Returns rows as a model takes them for a prediction."""
        rows = self.prepare(data, [0] * len(data))
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows])}

    def shown(self, row: Mapping[str, Any]) -> list[str]:
        """Returns a list of one image, as the pipeline of transformers takes it."""
        path = row[self.columns[0]].get("path")
        return [path if path and Path(path).is_file() else "image.png"]


class Pixels(torch.utils.data.Dataset):
    """Images and the numbers of their classes, decoded and resized when a row is read."""

    def __init__(self, data: datasets.Dataset, column: str, numbers: Sequence[int], processor: Any):
        self._data, self._column, self._numbers, self._processor = data, column, numbers, processor

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stored = self._data[index][self._column]
        pixels = self._processor(decoded(stored), return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": self._numbers[index]}  # [channels, height, width]


@dataclass(frozen=True)
class Classes:
    """The classes of a data set."""

    names: list[str]  # by number, as the model's config has them
    number_of: dict[str, int]  # of each label, as a text

    @classmethod
    def declared(cls, rows: Rows, column: str) -> "Classes | None":
        """Returns the classes that a data set declares for its column (`datasets.ClassLabel`), if it does."""
        feature = (rows.data.features or {}).get(column)
        if not isinstance(feature, ClassLabel):
            return None
        return cls(list(feature.names), {str(number): number for number in range(feature.num_classes)})

    @classmethod
    def of(cls, labels: Iterable[str]) -> "Classes":
        """Returns the classes of the labels that occur: integers in their order, others by the alphabet."""
        found = set(labels)
        are_numbers = all(label.removeprefix("-").isdecimal() for label in found)
        names = sorted(found, key=int if are_numbers else None)
        return cls(names, {name: number for number, name in enumerate(names)})

    def __str__(self) -> str:
        known = list(self.number_of)
        return ", ".join(known) if len(known) <= 10 else f"{len(known)} classes, {known[0]} to {known[-1]}"


def read_labelled(
    rows: Rows, inputs: Texts | Images, column: str, classes: Classes | None, *, skip_bad_rows: bool
) -> tuple[Dataset, int]:
    """Reads rows with the columns of `inputs` and a column `label` of texts, each of one of the `classes` if they are
    known. Returns them, and the number of bad rows that were dropped."""
    features = Features({**inputs.features, "label": Value("string")})
    return encode_rows(rows, partial(_labelled, inputs, column, classes), features, skip_bad_rows=skip_bad_rows)


def _labelled(inputs: Texts | Images, column: str, classes: Classes | None, row: dict[str, Any]) -> dict[str, Any]:
    label = row.get(column)
    if label is None or label == "":
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(label, (str, int)):
        raise BadRow(f"a {type(label).__name__} in column {column!r}, expected a text or a whole number")
    if classes and str(label) not in classes.number_of:
        raise BadRow(f"class {str(label)!r} is none of the training rows' or of the data set's: {classes}")
    return {**inputs.take(row), "label": str(label)}


def held_out(rows: Dataset, inputs: Texts | Images) -> tuple[Dataset, Dataset]:
    """Splits rows so that equal ones never land on both sides: about 80 % to train on, 20 % to test on."""
    is_test = np.array([is_test_hash(inputs.hash(row)) for row in rows])
    return rows.select(np.flatnonzero(~is_test)), rows.select(np.flatnonzero(is_test))
