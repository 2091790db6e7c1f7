"""Texts, or pairs of texts, as what is classified."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import BatchEncoding

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.rows import text_of
from hf_zero.recipes.data.stats import cut_note
from hf_zero.recipes.docstrings import text_hash
from hf_zero.recipes.loading import load_tokenizer


class Texts:
    """How texts come to a model.

    Args:
        columns (`Sequence[str]`): The column of the text and, of pairs, that of the second one.
        max_length (`int`): Longer ones are cut to so many tokens.
    """

    task = "text-classification"
    auto_class = AutoModelForSequenceClassification
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = "SEQ_CLS"
    has_lengths = True  # rows can be grouped by length

    columns: tuple[str, ...]
    processor: PreTrainedTokenizerBase  # from `load_processor` on

    def __init__(self, columns: Sequence[str], max_length: int):
        self.columns, self._max_length = tuple(columns), max_length
        self._num_cut = self._num_lost = 0

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the tokenizer of a model.

        Raises:
            ConfigError: It does not load, or cannot pad.
        """
        tokenizer = load_tokenizer(path, **where)
        if tokenizer.pad_token is None:
            raise ConfigError(f"{path}: its tokenizer has no token to pad with; set pad_token and save it again")
        self.processor = tokenizer

    def take(self, row: Mapping[str, Any]) -> dict[str, str]:
        """What is read of a row.

        Raises:
            BadRow: a text is missing, or is none.
        """
        return {column: text_of(row.get(column), column) for column in self.columns}

    def hash(self, row: Mapping[str, Any]) -> str:
        """What decides on which side of a split a row lies."""
        return text_hash(row[self.columns[0]])

    def prepare(self, data: Dataset, numbers: Sequence[int]) -> Dataset:
        """Tokenizes rows; `numbers` are those of their classes."""
        tokens = self._tokens(data)
        self._count_cut(data, tokens)
        columns = {name: ids for name, ids in tokens.items() if name in self.processor.model_input_names}
        return Dataset.from_dict({**columns, "labels": list(numbers)})

    def notes(self) -> list[str]:
        """How much of what was prepared has been cut: one line, or none."""
        return [cut_note(self._num_cut, self._max_length, self._num_lost)] if self._num_cut else []

    def batch(self, data: Dataset) -> BatchEncoding:
        """Rows as a model takes them, to predict."""
        return self._tokens(data, padding=True, return_tensors="pt")

    def shown(self, row: Mapping[str, Any]) -> str | dict[str, str]:
        """A row as the pipeline of transformers takes it, not too long for a command line."""
        texts = [textwrap.shorten(row[column], 60, placeholder="") for column in self.columns]
        return texts[0] if len(texts) == 1 else dict(zip(("text", "text_pair"), texts))

    def _count_cut(self, data: Dataset, tokens: BatchEncoding) -> None:
        full = [row for row, ids in enumerate(tokens["input_ids"]) if len(ids) >= self._max_length]
        if full:
            whole = self.processor(*self._texts(data.select(full)), verbose=False)["input_ids"]
            lost = [len(ids) - self._max_length for ids in whole]
            self._num_cut += sum(number > 0 for number in lost)
            self._num_lost += sum(lost)

    def _texts(self, data: Dataset) -> list[list[str]]:
        return [list(data[column]) for column in self.columns]

    def _tokens(self, data: Dataset, **settings: Any) -> BatchEncoding:
        return self.processor(*self._texts(data), truncation=True, max_length=self._max_length, **settings)
