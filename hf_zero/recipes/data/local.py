"""Local files of JSON lines, JSON, CSV, Parquet or text, read by `datasets`."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import IterableDataset, concatenate_datasets, load_dataset, load_dataset_builder
from datasets.arrow_writer import SchemaInferenceError

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import PLACE, Form, RowRange, Rows, undecoded


NO_ROWS = "no rows, expected one at least"
JSON_LINES = (".jsonl", ".ndjson")
READERS = {
    **dict.fromkeys(JSON_LINES, "text"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def is_local(name: str) -> bool:
    """Whether a data set is a file or folder of this machine, and no hub id."""
    return Path(name).expanduser().exists()


def check_path(name: str, key: str) -> None:
    """Refuses a file that is not there, or of a kind that is not read.

    Args:
        name (`str`): a path, or for the key `dataset_name` also a hub id.
        key (`str`): what the user calls this setting.

    Raises:
        DataError: naming it.
    """
    path = Path(name).expanduser()
    is_path = key != "dataset_name" or path.suffix.lower() in READERS or name.startswith((".", "/", "~"))
    if is_path and not path.exists():
        raise DataError(f"{name}: no such file; check {key}")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise DataError(f"{name}: a {path.suffix or 'nameless'} file, expected one of {', '.join(READERS)}")


def files_of(name: str, config: str | None, split: str) -> list[Path] | None:
    """The files of a local split, by the names that `datasets` goes by in a folder.

    Args:
        name (`str`): a file, which is one split, "train", or a folder.
        config (`str`, *optional*): which configuration of the folder.
        split (`str`): its name, or a slice of it.

    Returns:
        `list[Path]`, or `None` where the folder holds something else, such as images, for which `datasets` has a
        loader.

    Raises:
        DataError: the split is not there.
    """
    path = Path(name).expanduser()
    if path.is_file():
        found = {"train": [path]}
    else:
        with as_data_error(name):
            data_files = load_dataset_builder(str(path), config).config.data_files or {}
        found = {str(key): [Path(file) for file in files] for key, files in data_files.items()}
    base = split.partition("[")[0]
    if found and base not in found:
        raise DataError(f"{name}: split {split!r}, expected one of {', '.join(found)}, or a slice such as train[:90%]")
    files = found.get(base, [])
    kinds = {file.suffix.lower() for file in files}
    return files if len(kinds) == 1 and kinds <= set(READERS) else None


def load_files(name: str, files: list[Path], split: str, skip_bad_rows: bool) -> Rows:
    """Reads files of one kind.

    Args:
        name (`str`): what the user calls them.
        files (`list[Path]`): one or more.
        split (`str`): all of them, or a slice of it.
        skip_bad_rows (`bool`): leaves out rows of CSV files that have more fields than the header. Other bad rows
            are met when rows are used.
    """
    reader, options, form = _reader(files[0])
    tables, num_unreadable = [], 0
    for file in files:
        with as_data_error(str(file)):
            if reader == "csv" and skip_bad_rows:
                options["on_bad_lines"] = "skip"
                num_unreadable += _num_overlong(file, options["sep"])
            tables.append(load_dataset(reader, data_files=str(file), split="train", **options))
    parts = [RowRange(str(file), _unit(reader), 0, len(table)) for file, table in zip(files, tables, strict=True)]
    data = tables[0] if len(tables) == 1 else concatenate_datasets(tables)
    return Rows(data, name, tuple(parts), form, num_unreadable=num_unreadable).slice(split)


def stream_files(name: str, files: list[Path], split: str) -> Rows:
    """Reads files of one kind while their rows are used.

    Raises:
        ConfigError: a slice, which takes the number of rows to be known.
    """
    if "[" in split:
        raise ConfigError(
            f"{name}: split {split!r} with dataset_streaming: streams have no slices; use max_train_rows"
        )
    reader, options, form = _reader(files[0])
    given = {"files": [str(file) for file in files], "reader": reader, "options": options}
    data = IterableDataset.from_generator(_placed_rows, gen_kwargs=given)
    return Rows(data, name, (RowRange(name, _unit(reader), 0, None),), form)


def _placed_rows(files: list[str], reader: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for file in files:
        data = undecoded(load_dataset(reader, data_files=file, split="train", streaming=True, **options))
        for number, row in enumerate(data, start=1):
            yield {**row, PLACE: f"{file}: {_unit(reader)} {number}"}


@contextmanager
def as_data_error(source: str) -> Iterator[None]:
    """Turns whatever `datasets` raises into one line of ours.

    Raises:
        DataError: naming the source, with the cause.
    """
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:  # it raises what Arrow, pandas, fsspec and the hub's client raise
        cause = error.__cause__ or error
        if isinstance(cause, SchemaInferenceError) or "corresponds to no data" in str(cause):
            raise DataError(f"{source}: {NO_ROWS}") from error
        reason = " ".join(str(cause).split())[:300] or repr(cause)
        raise DataError(f"{source}: cannot be read ({type(cause).__name__}: {reason}); correct it") from error


def _reader(file: Path) -> tuple[str, dict[str, Any], Form]:
    """The loader of `datasets`, its options, and the form of the rows."""
    kind = file.suffix.lower()
    reader = READERS[kind]
    if kind in JSON_LINES or (kind == ".json" and _has_json_lines(file)):
        return "text", {"encoding": "utf-8-sig"}, "json"
    if reader == "text":
        return reader, {"encoding": "utf-8-sig"}, "text"
    if reader == "csv":  # "NA" and "None" are words like any other
        return reader, {"keep_default_na": False, "sep": "\t" if kind == ".tsv" else ","}, "columns"
    return reader, {}, "columns"


def _unit(reader: str) -> str:
    return "line" if reader == "text" else "row"


def _has_json_lines(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return isinstance(json.loads(stream.readline()), dict)
    except (OSError, ValueError):
        return False


def _num_overlong(file: Path, separator: str) -> int:
    """How many rows of a CSV file have more fields than its header: pandas leaves them out without a word."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=separator)
        width = len(next(rows, []))
        return sum(len(row) > width for row in rows)
