"""Rows that are read while training goes on."""

import json
from itertools import islice
from threading import Lock
from time import sleep
from types import SimpleNamespace

import pytest
from datasets import Dataset, Features, Value, interleave_datasets

from hf_zero.errors import DataError
from hf_zero.recipes.data.rows import BadRow, encode_rows
from hf_zero.recipes.data.sources import MixtureArguments, Stream, load_rows, mix
from hf_zero.recipes.tasks import SourceArguments


@pytest.mark.quick
def test_a_stream_begins_again_and_ends_where_there_are_no_rows():
    rows = Dataset.from_dict({"n": [0, 1]}).to_iterable_dataset()
    assert [row["n"] for row in islice(Stream(rows), 5)] == [0, 1, 0, 1, 0]
    assert list(Stream(rows.filter(lambda row: row["n"] > 1))) == []


def test_a_stream_is_shuffled_alike_in_every_process_and_otherwise_in_every_pass():
    rows, arguments = Dataset.from_dict({"n": range(100)}).to_iterable_dataset(), MixtureArguments()

    def passes(**settings):
        training = SimpleNamespace(**{"train_sampling_strategy": "random", "seed": 1, "data_seed": None, **settings})
        numbers = [row["n"] for row in islice(Stream(mix([rows], arguments, training)), 200)]
        return numbers[:100], numbers[100:]

    first, second = passes()
    in_order = list(range(100))
    assert first != second and sorted(first) == sorted(second) == in_order
    assert first not in (in_order, passes(data_seed=2)[0])
    assert passes() == (first, second)
    assert passes(train_sampling_strategy="sequential") == (in_order, in_order)
    arguments.dataset_shuffle_buffer = 5
    near = passes()[0]
    assert max(n - place for place, n in enumerate(near)) < 5 and near != in_order


def test_a_bad_row_of_a_folder_is_named_by_its_file(tmp_path):
    for number in range(3):
        rows = [{"text": f"{number}.{line}"} for line in range(3)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def read(row):
        assert list(row) == ["text"]
        if row["text"] == "1.2":
            raise BadRow("bad")
        return row

    rows = load_rows(SourceArguments(dataset_name=str(tmp_path), dataset_streaming=True), "train")
    assert rows.columns == ["text"]
    with pytest.raises(DataError, match="1.jsonl: line 3: bad; correct it"):
        encode_rows(rows, read, Features({"text": Value("string")}), skip_bad_rows=False)
    skipping, _ = encode_rows(rows, read, Features({"text": Value("string")}), skip_bad_rows=True)
    assert [row["text"] for row in skipping] == [
        f"{n}.{line}" for n in range(3) for line in range(3) if (n, line) != (1, 2)
    ]


def test_rows_of_streams_that_are_interleaved_are_encoded_one_at_a_time(tmp_path):
    """`datasets` reads them in threads, and chat templates are not safe in threads."""
    busy = Lock()

    def read(row):
        assert busy.acquire(blocking=False), "two rows at a time"
        sleep(0.001)
        busy.release()
        return row

    parts = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n' * 20, encoding="utf-8")
        rows = load_rows(SourceArguments(train_file=f"{tmp_path}/{name}.jsonl", dataset_streaming=True), "train")
        parts.append(encode_rows(rows, read, Features({"text": Value("string")}), skip_bad_rows=False)[0])
    assert len(list(interleave_datasets(parts, [0.5, 0.5], seed=1))) >= 20
