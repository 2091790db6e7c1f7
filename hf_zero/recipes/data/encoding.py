"""Applies a function to every row, and tells bad rows by file and line."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value
from datasets.fingerprint import Hasher

from hf_zero.errors import DataError
from hf_zero.recipes.data.rows import BadRow, Rows
from hf_zero.recipes.data.sources import quiet_datasets


PROBLEM = "_problem"  # a column of our own: where a bad row is, and what is wrong with it


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
    encoded while it is used: its bad rows are then met one by one, and not counted. Raises [`DataError`], naming the
    first bad row, or where there is no good one.
    """
    encode = partial(_encode, replace(rows, data=None), function, list(features), rows.is_stream and not skip_bad_rows)
    features = Features({**features, PROBLEM: Value("string")})
    with quiet_datasets():
        if rows.is_stream:
            data = rows.data.map(
                encode, batched=True, with_indices=True, remove_columns=rows.raw_columns, features=features
            )
            return data.filter(_is_good, input_columns=PROBLEM).remove_columns(PROBLEM), 0
        data = rows.data.map(
            encode,
            batched=True,
            with_indices=True,
            remove_columns=rows.data.column_names,
            features=features,
            num_proc=num_proc,
            new_fingerprint=Hasher.hash([rows.data._fingerprint, key, str(rows.parts), rows.kept, code_hash()]),
        )
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
                raise DataError(_refusal(problem)) from error
        for name in names:
            encoded[name].append(result[name])
        encoded[PROBLEM].append(problem)
    return encoded


def _good(data: Dataset, rows: Rows, skip_bad_rows: bool) -> tuple[Dataset, int]:
    problems = data.data.column(PROBLEM)
    num_bad = len(problems) - problems.null_count
    if num_bad and not skip_bad_rows:
        first = pc.drop_null(problems)[0].as_py()
        raise DataError(_refusal(first) + (f" ({num_bad} rows are bad)" if num_bad > 1 else ""))
    if num_bad:
        good = np.flatnonzero(pc.is_null(problems).to_numpy(zero_copy_only=False))
        data = data.select(good)
    if not len(data):
        raise DataError(f"{rows.source}: all {num_bad} rows are bad; {pc.drop_null(problems)[0].as_py()}")
    return data.remove_columns(PROBLEM), num_bad + rows.num_unreadable


def _refusal(problem: str) -> str:
    return f"{problem}; correct it, or leave such rows out with --skip_bad_rows"


def _is_good(problem: str | None) -> bool:
    return problem is None


def is_reused(data: Dataset, since: float) -> bool:
    """Whether rows were in the cache of `datasets` before a moment, in seconds since 1970."""
    files = [Path(file["filename"]) for file in data.cache_files]
    return bool(files) and all(file.is_file() and file.stat().st_mtime < since for file in files)


def code_hash() -> str:
    """Of the modules that make rows, so that what an older version made of them is not found in the cache."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
