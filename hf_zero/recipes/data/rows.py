"""Rows as they lie in their source, what each is called in a message, and what a task makes of them: a function is
applied to every row, and bad ones are told by file and line."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Audio, Dataset, Features, Image, IterableDataset, List, ReadInstruction, Value, Video
from datasets.fingerprint import Hasher
from transformers import ProcessorMixin

from hf_zero.errors import ConfigError, DataError


Form = Literal["columns", "text", "json"]
IGNORED = -100  # the label of a token that the loss does not count
NUM_HASHED = 1000  # rows of a data set that stand for all, evenly spaced
PLACE = "_place"  # a column of our own in streams of local files: the file of a row, and its line
EXTRA = "_extra"  # a key of our own in rows of tables: the fields, where there are more than columns
PROBLEM = "_problem"  # a column of our own: where a bad row is, and what is wrong with it


class BadRow(ValueError):
    """A row that cannot be trained on; the message says why, without saying where it is."""


def text_of(value: Any, column: str) -> str:
    """What a row holds in a column of texts. Raises [`BadRow`] where it is no text, or an empty one."""
    if value is None or isinstance(value, str) and not value.strip():
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a text")
    return value


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one file or split."""

    source: str  # what messages call it
    unit: str  # "line" or "row"
    start: int  # how many rows of the source come before these
    num_rows: int | None  # `None` for a stream, whose rows know their places


@dataclass(frozen=True)
class Rows:
    """What is trained or evaluated on, before it is rendered.

    Rows of JSON and of tables are kept as lines of JSON until a row is used. A line that is not JSON, or a column
    whose type changes from line to line, is then a problem of that one row, which can be named or left out, and not of
    the whole file."""

    data: Dataset | IterableDataset  # raw rows; [`Rows.read`] makes a row of one
    source: str  # what messages call all of it
    parts: tuple[RowRange, ...]  # in the order of the rows
    form: Form = "columns"  # "columns", or "text" or "json" where a raw row is one line of a file
    example: dict[str, Any] = field(default_factory=dict, repr=False)  # the first row that can be read
    raw_columns: list[str] = field(default_factory=list, repr=False)  # those of the raw row that it is made of
    kept: tuple[str, ...] = ()  # the columns that rows have; all of them, if it is empty

    @property
    def columns(self) -> list[str]:
        return list(self.example)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.data, IterableDataset)

    def where(self, index: int, raw: dict[str, Any] | None = None) -> str:
        """Names a row: the file and its line, or the split and its row, both counted from 1. In a stream of local
        files the raw row knows its place; of the hub's, each process counts the rows that it has seen."""
        if raw and PLACE in raw:
            return raw[PLACE]
        for part in self.parts:
            if part.num_rows is None or index < part.num_rows:
                return f"{part.source}: {part.unit} {part.start + index + 1}"
            index -= part.num_rows
        raise IndexError(index)

    def read(self, raw: dict[str, Any]) -> dict[str, Any] | None:
        """Makes a row of a raw one; `None` of an empty line. Raises [`BadRow`] for a line that is no JSON object."""
        row = self._read(raw)
        return {name: row[name] for name in self.kept if name in row} if row and self.kept else row

    def _read(self, raw: dict[str, Any]) -> dict[str, Any] | None:
        if self.form == "columns":
            return {name: _without_nulls(value) for name, value in raw.items() if name != PLACE}
        line = raw["text"]
        if not line.strip():
            return None
        if self.form == "text":
            return {"text": line}
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadRow(f"not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadRow(f"a JSON {type(row).__name__}, expected an object")
        if EXTRA in row:
            raise BadRow(f"{len(row[EXTRA])} fields, expected {len(row) - 1}, one for each column; quote texts")
        return row

    def good(self) -> Iterator[dict[str, Any]]:
        """Yields the readable rows. Bad rows are reported, or dropped, when the rows are encoded."""
        for raw in self.data:
            with suppress(BadRow):
                if (row := self.read(raw)) is not None:
                    yield row

    def first(self, num_rows: int | None) -> "Rows":
        """The first so many rows; all of them for `None`."""
        if num_rows is None:
            return self
        if self.is_stream:
            return replace(self, data=self.data.take(num_rows))
        return replace(self, data=self.data.select(range(min(num_rows, len(self.data)))))

    def slice(self, split: str) -> "Rows":
        """The rows that an expression of `datasets` such as `train[:90%]` names, of all rows of that split."""
        if "[" not in split:
            return self
        try:
            ranges = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: len(self.data)})
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"{self.source}: split {split!r}: {error}; write it as train[:90%]") from error
        indices = [range(piece.from_, piece.to) for piece in ranges]
        data = self.data.select(indices[0] if len(indices) == 1 else [i for each in indices for i in each])
        parts = tuple(part for each in indices for part in _within(self.parts, each.start, each.stop))
        return replace(self, data=data, parts=parts)

    def only(self, columns: Sequence[str]) -> "Rows":
        """The same rows with some of their columns."""
        self.require(columns)
        return replace(self, kept=tuple(columns), example={name: self.example[name] for name in columns})

    def require(self, columns: Iterable[str]) -> None:
        """Checks that columns are there."""
        missing = [column for column in columns if column not in self.columns]
        if missing:
            raise DataError(f"{self.source}: columns found {self.columns}, column expected {missing[0]!r}; rename it")


def undecoded(data: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The same rows with images and the like as the files they are: one that cannot be decoded is a problem of its
    row."""
    for name, feature in (data.features or {}).items():
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, (Audio, Image, Video)):
            stored = type(inner)(decode=False)
            data = data.cast_column(name, List(stored) if isinstance(feature, List) else stored)
    return data


def _without_nulls(value: Any) -> Any:
    """A value of a column without the keys that Arrow gives an object because others have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [_without_nulls(each) for each in value]
    return value


def _within(parts: Iterable[RowRange], start: int, stop: int) -> Iterator[RowRange]:
    """What of `parts` lies between two positions in all of them together."""
    for part in parts:
        low, high = max(start, 0), min(stop, part.num_rows)
        if low < high:
            yield replace(part, start=part.start + low, num_rows=high - low)
        start, stop = start - part.num_rows, stop - part.num_rows


@dataclass
class Data:
    """What a task trains on, for a trainer, and what there is to say of it. A trainer that tokenizes adds to that."""

    train: Any  # rows for the trainer
    test: Any  # likewise, to evaluate on
    processing_class: Any  # saved beside the model
    source: str  # what the data is called: a hub id or a file
    notes: list[str] = field(default_factory=list)  # one line each: how many rows, cut, skipped. Rank 0 prints them
    sample: str = ""  # the first row as the model reads it, with what the loss counts marked
    rows: Sequence[Rows] = ()  # those to train on, as they were read
    # what the task alone knows, such as the labels of a classifier
    extra: dict[str, Any] = field(default_factory=dict)

    def rows_summary(self) -> str | None:
        """How many rows are trained on, and a hash of a sample of them, which other rows or another order change;
        `None` of streams."""
        if not self.rows or any(each.is_stream for each in self.rows):
            return None
        digest = sha256()
        for each in self.rows:
            step = max(1, len(each.data) // NUM_HASHED)
            digest.update(repr(each.data.select(range(0, len(each.data), step)).to_list()).encode())
        return f"{plural(sum(len(each.data) for each in self.rows), 'row')}, {digest.hexdigest()[:16]}"

    @property
    def has_images(self) -> bool:
        """Whether a processor makes the inputs, of images and texts."""
        return isinstance(self.processing_class, ProcessorMixin)


def cut_notes(lost: Sequence[int] | np.ndarray, max_length: int | None) -> list[str]:
    """Says how many rows were cut to `max_length` tokens, and what they lost; nothing where none was cut."""
    num_rows, num_tokens = int(np.count_nonzero(lost)), int(np.sum(lost))
    said = f"{plural(num_rows, 'row')} cut to {max_length} tokens, {plural(num_tokens, 'token')} lost"
    return [said] if num_rows else []


def plural(number: int, noun: str) -> str:
    """The number with its noun: 1 row, 2 rows, 10,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keeps `datasets` from drawing bars, and from logging what it raises as well."""
    verbosity, has_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if has_bars:
            datasets.enable_progress_bars()


def encode_rows(
    rows: Rows,
    function: Callable[[dict[str, Any]], dict[str, Any]],
    features: Features,
    *,
    skip_bad_rows: bool,
    key: str,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, int]:
    """Applies a function to every row, which raises [`BadRow`] on one that it refuses. Returns the new data set with
    the columns `features`, and how many bad rows it lacks.

    The result is kept in the cache of `datasets`, under a name that depends on the rows, on our code, and on `key`:
    all that the function depends on. Call it in all processes, under `training.main_process_first()`. A stream is
    encoded while it is used, and its bad rows are not counted. Raises [`DataError`], naming the first bad row, or
    where there is no good one.
    """
    encode = partial(_encode, replace(rows, data=None), function, list(features), rows.is_stream and not skip_bad_rows)
    options: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": rows.raw_columns}
    options["features"] = Features({**features, PROBLEM: Value("string")})
    with quiet_datasets():
        if rows.is_stream:
            data = rows.data.map(encode, **options)
            return data.filter(_is_good, input_columns=PROBLEM).remove_columns(PROBLEM), 0
        fingerprint = Hasher.hash([rows.data._fingerprint, key, str(rows.parts), rows.kept, code_hash()])
        data = rows.data.map(encode, num_proc=num_proc, new_fingerprint=fingerprint, **options)
    return _good(data, rows, skip_bad_rows)


def _encode(rows: Rows, function: Callable, names: list[str], raises: bool, batch: dict, indices: list[int]) -> dict:
    encoded: dict[str, list] = {name: [] for name in (*names, PROBLEM)}
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        problem, result, raw = None, dict.fromkeys(names), dict(zip(batch, values, strict=True))
        try:
            row = rows.read(raw)
            if row is None:
                continue
            result = function(row)
        except BadRow as error:
            problem = f"{rows.where(index, raw)}: {error}"
            if raises:
                raise DataError(refusal(problem)) from error
        for name in names:
            encoded[name].append(result[name])
        encoded[PROBLEM].append(problem)
    return encoded


def _is_good(problem: str | None) -> bool:  # workers of a loader are given it, and a lambda cannot be
    return problem is None


def _good(data: Dataset, rows: Rows, skip_bad_rows: bool) -> tuple[Dataset, int]:
    problems = data.data.column(PROBLEM)
    num_bad = len(problems) - problems.null_count
    if num_bad and not skip_bad_rows:
        first = pc.drop_null(problems)[0].as_py()
        raise DataError(refusal(first) + (f" ({num_bad} rows are bad)" if num_bad > 1 else ""))
    if num_bad:
        good = np.flatnonzero(pc.is_null(problems).to_numpy(zero_copy_only=False))
        data = data.select(good)
    if not len(data):
        raise DataError(f"{rows.source}: all {num_bad} rows are bad; {pc.drop_null(problems)[0].as_py()}")
    return data.remove_columns(PROBLEM), num_bad


def refusal(problem: str) -> str:
    """What to say of a bad row, where none is left out."""
    return f"{problem}; correct it, or leave such rows out with --skip_bad_rows"


def is_reused(data: Dataset, since: float) -> bool:
    """Whether rows were in the cache of `datasets` before a moment, in seconds since 1970."""
    files = [Path(file["filename"]) for file in data.cache_files]
    return bool(files) and all(file.is_file() and file.stat().st_mtime < since for file in files)


def code_hash() -> str:
    """Of the modules that make rows, so that what an older version made of them is not found in the cache."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
