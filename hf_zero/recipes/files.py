"""Labelled texts from a local CSV, JSON or JSON-lines file."""

import csv
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hf_zero.errors import DataError
from hf_zero.recipes.examples import Example


READERS = {".csv": "csv", ".json": "json", ".jsonl": "json"}


def check_file(path: str, columns: Iterable[str]) -> None:
    """Looks at the first row of a file, so that a wrong column is told before anything is loaded.

    Args:
        path (`str`): A `.csv`, `.json` or `.jsonl` file.
        columns (`Iterable[str]`): The columns it has to have.

    Raises:
        DataError: If the file is not there, is of another kind, is empty, or lacks one of the columns.
    """
    file = Path(path)
    if file.suffix.lower() not in READERS:
        raise DataError(f"{path}: a {file.suffix or 'nameless'} file, expected one of {', '.join(READERS)}")
    if not file.is_file():
        raise DataError(f"{path}: no such file; check train_file and test_file")
    try:
        found = _first_row_columns(file)
    except (ValueError, OSError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as {file.suffix[1:]} ({error}); check its first row") from error
    missing = [column for column in columns if column not in found]
    if missing:
        raise DataError(
            f"{path}: columns found {found}, column expected {missing[0]!r}; "
            "rename it, or set text_column and label_column"
        )


def load_file(path: str, text_column: str, label_column: str) -> list[Example]:
    """Reads a file through `datasets`; labels become strings, whatever type they have.

    Args:
        path (`str`): A `.csv`, `.json` or `.jsonl` file.
        text_column (`str`): The column with the text.
        label_column (`str`): The column with the class.

    Returns:
        `list[Example]`: One example per row, in the order of the file.

    Raises:
        DataError: If the file cannot be read, has no rows, or a row has no text or no label.
    """
    check_file(path, (text_column, label_column))
    examples = []
    for number, row in enumerate(_read(path), start=1):
        text, label = row[text_column], row[label_column]
        if text in (None, "") or label in (None, ""):
            empty = text_column if text in (None, "") else label_column
            raise DataError(f"{path}: row {number} has nothing in column {empty!r}; fill it in or drop the row")
        examples.append(Example(str(text), str(label)))
    return examples


def _read(path: str) -> list[dict]:
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    reader = READERS[Path(path).suffix.lower()]
    options = {"keep_default_na": False} if reader == "csv" else {}  # "NA" and "None" are words like any other
    # Every rank reads for itself, and no copy of the user's data stays behind in a cache.
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as cache:
        try:
            return load_dataset(reader, data_files=path, split="train", cache_dir=cache, **options).to_list()
        except (DatasetGenerationError, ValueError, OSError) as error:
            cause = str(error.__cause__ or error).strip().splitlines()
            raise DataError(f"{path}: cannot be read ({cause[-1] if cause else error!r}); correct that row") from error


def _first_row_columns(file: Path) -> list[str]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        if file.suffix.lower() == ".csv":
            rows = csv.reader(stream)
            header = next(rows, [])
            if header and next(rows, None) is None:
                raise ValueError("no rows below the header")
            return header
        line = stream.readline()
        if not line.strip():
            return []
        if line.lstrip().startswith("["):
            rows = json.loads(line + stream.read())
            return list(rows[0]) if rows else []
        return list(json.loads(line))
