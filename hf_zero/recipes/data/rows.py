"""Rows as they lie in their source, the names that messages give them, and applying a function to every row."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import transformers
from datasets import Audio, Dataset, Features, Image, IterableDataset, Json, List, Video
from datasets.fingerprint import Hasher
from transformers import ProcessorMixin

from hf_zero.errors import DataError


IGNORED = -100  # the label of a token that the loss does not count
# Rows whose hash stands for a data set: evenly spaced ones, or the first of a stream, which may have to be downloaded.
NUM_HASHED, NUM_STREAMED = 1000, 20
PLACE = "_place"  # a column of our own: the file of a row, and its line
CONTENT = "_content"  # a column of our own: a row of a local file, as JSON
EXTRA = "_extra"  # a key of our own in rows of tables: the fields beyond the columns


class BadRow(ValueError):
    """A row that cannot be trained on. The message says why, and not where the row is."""


def text_of(value: Any, column: str) -> str:
    """Returns the text in a column. Raises [`BadRow`] if it is empty, or no text."""
    if value is None or isinstance(value, str) and not value.strip():
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a text")
    return value


@dataclass(frozen=True)
class Rows:
    """The rows of one data set, before they are encoded.

    Rows of local files are kept as JSON until they are used. A line that is not JSON, or a column whose type changes
    from line to line, is then a problem of that row, which can be named or dropped, and not of the whole file."""

    data: Dataset | IterableDataset  # raw rows; `read` makes a row of one
    source: str  # the name of the data set in messages
    folders: tuple[Path, ...] = ()  # of local files, in which relative paths begin
    example: dict[str, Any] = field(default_factory=dict, repr=False)  # the first row that can be read
    kept: tuple[str, ...] = ()  # the columns that rows have; all of them if it is empty

    @property
    def columns(self) -> list[str]:
        return list(self.example)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.data, IterableDataset)

    def where(self, index: int, raw: dict[str, Any]) -> str:
        """Names a row: by its file and line, or by its number in the split, both counted from 1. In a stream from the
        Hub, each process counts the rows that it has seen."""
        return raw.get(PLACE) or f"{self.source}: row {index + 1}"

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Makes a row of a raw one. Raises [`BadRow`] for a line that is no JSON object."""
        if CONTENT not in raw:
            row = {name: _without_nulls(value) for name, value in raw.items()}
        else:
            try:
                row = json.loads(raw[CONTENT])
            except ValueError as error:
                raise BadRow(f"not JSON ({error})") from error
            if not isinstance(row, dict):
                raise BadRow(f"a JSON {type(row).__name__}, expected an object")
            if EXTRA in row:
                num_columns = len(row) - 1
                found = num_columns + len(row[EXTRA])
                raise BadRow(f"{found} fields, expected {num_columns}, one for each column; quote texts")
        return {name: row[name] for name in self.kept if name in row} if self.kept else row

    def good(self) -> Iterator[dict[str, Any]]:
        """Yields the readable rows. Bad rows are reported, or dropped, when the rows are encoded."""
        for raw in self.data:
            with suppress(BadRow):
                yield self.read(raw)

    def require(self, columns: Iterable[str]) -> None:
        """Raises [`DataError`] if a column is missing."""
        missing = [column for column in columns if column not in self.columns]
        if missing:
            raise DataError(f"{self.source}: columns found {self.columns}, column expected {missing[0]!r}; rename it")


def undecoded(data: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Returns the same rows with images and other media as files. One that cannot be decoded is a problem of its
    row."""
    for name, feature in (data.features or {}).items():
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, (Audio, Image, Video)):
            stored = type(inner)(decode=False)
            data = data.cast_column(name, List(stored) if isinstance(feature, List) else stored)
    return data


def _without_nulls(value: Any) -> Any:
    """Returns a value of an Arrow column without the keys that its objects only have because others have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [_without_nulls(each) for each in value]
    return value


@dataclass
class Data:
    """The rows of a run as the trainer takes them, and what is printed about them."""

    train: Any
    test: Any  # `None` without test rows
    processing_class: Any  # saved beside the model
    source: str  # the name of the data: a Hub id or a file
    notes: list[str] = field(default_factory=list)  # lines that rank 0 prints: how many rows, cut, dropped
    sample: str = ""  # the first row as the model reads it, with the tokens that the loss counts marked
    rows: Sequence[Rows] = ()  # the training rows as they were read
    asked: Sequence[dict[str, Any]] = ()  # some test rows as they were read, before they are tokenized
    # facts of one task, such as the labels of a classifier
    extra: dict[str, Any] = field(default_factory=dict)

    def rows_summary(self) -> str | None:
        """Returns the number of training rows, and a hash of a sample of them; `None` if none were read."""
        if not self.rows:
            return None
        digest, is_stream = sha256(), any(each.is_stream for each in self.rows)
        for data in (each.data for each in self.rows):
            if is_stream:
                sample = data.take(NUM_STREAMED)
            else:
                sample = data.select(range(0, len(data), max(1, len(data) // NUM_HASHED))).to_list()
            digest.update(repr([{name: row[name] for name in row if name != PLACE} for row in sample]).encode())
        found = "a stream" if is_stream else plural(sum(len(each.data) for each in self.rows), "row")
        return f"{found}, {digest.hexdigest()[:16]}"

    @property
    def has_images(self) -> bool:
        """Whether inputs contain images and texts, so that a processor prepares them instead of a tokenizer."""
        return isinstance(self.processing_class, ProcessorMixin)


def plural(number: int, noun: str) -> str:
    """Returns the number with its noun: 1 row, 2 rows, 10,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def encode_rows(
    rows: Rows,
    function: Callable[[dict[str, Any]], dict[str, Any]],
    features: Features,
    *,
    skip_bad_rows: bool,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, int]:
    """Applies a function to every row, which raises [`BadRow`] to refuse it. Returns the new data set with the columns
    `features`, and the number of bad rows that were dropped.

    `datasets` caches the result under a hash of the rows, the function with its arguments, and the code of this
    package. Call it in all processes, under `training.main_process_first()`. A stream is encoded while it is used, and
    its bad rows are not counted. Raises [`DataError`], naming the first bad row, or if there is no good one.
    """
    encode = partial(_encode, replace(rows, data=None), function, features, skip_bad_rows)
    options = {"batched": True, "with_indices": True, "remove_columns": list(next(iter(rows.data)))}
    if not rows.is_stream:
        fingerprint = Hasher.hash([rows.data._fingerprint, encode, code_hash(), transformers.__version__])
        options |= {"num_proc": num_proc, "new_fingerprint": fingerprint}
    data = rows.data.map(encode, features=features, **options)
    if next(iter(data), None) is None:
        fault, first = "", next(iter(rows.data), None)
        try:
            if first is not None:
                function(rows.read(first))
        except BadRow as error:
            fault = f" ({rows.where(0, first)}: {error})"
        raise DataError(f"{rows.source}: no good row, expected one at least{fault}; correct them")
    return data, 0 if rows.is_stream else len(rows.data) - len(data)


_ONE_ROW = Lock()  # `datasets` interleaves streams in threads, and chat templates are not safe in threads


def _encode(
    rows: Rows, function: Callable, features: Features, skip_bad_rows: bool, batch: dict, indices: list[int]
) -> dict[str, list]:
    encoded: dict[str, list] = {name: [] for name in features}
    for index, values in zip(indices, zip(*batch.values())):
        raw = dict(zip(batch, values))
        try:
            with _ONE_ROW:
                result = function(rows.read(raw))
        except BadRow as error:
            if skip_bad_rows:
                continue
            problem = f"{rows.where(index, raw)}: {error}"
            raise DataError(f"{problem}; correct it, or leave such rows out with --skip_bad_rows") from error
        for name, feature in features.items():
            value = result[name]
            # `datasets` takes a text in such a column for JSON, and would make a number of "42"
            is_text = isinstance(feature, Json) and isinstance(value, str)
            encoded[name].append(json.dumps(value) if is_text else value)
    return encoded


@cache
def code_hash() -> str:
    """Returns a hash of the modules that encode rows, so that results of another version are not reused."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
