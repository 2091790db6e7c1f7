"""Data sets of the user's own."""

import json

import pytest

from hf_zero.errors import DataError
from hf_zero.recipes.examples import Example
from hf_zero.recipes.files import load_file
from tests.recipes.conftest import write_csv


ROWS = [{"text": "one, two", "label": 1}, {"text": "three", "label": 2}]
EXAMPLES = [Example("one, two", "1"), Example("three", "2")]


def test_csv_json_and_json_lines_give_the_same_examples(tmp_path):
    write_csv(tmp_path / "rows.csv", [("label", "text"), *((row["label"], row["text"]) for row in ROWS)])
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    for name in ("rows.csv", "rows.json", "rows.jsonl"):
        assert load_file(str(tmp_path / name), "text", "label") == EXAMPLES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,topic\nx,y\n", r"columns found \['text', 'topic'\], column expected 'label'"),
        ("a.jsonl", '{"label": 1}\n', r"columns found \['label'\], column expected 'text'"),
        ("a.json", "[]", r"columns found \[\]"),
        ("a.csv", "", r"columns found \[\]"),
        ("a.csv", "text,label\n", "no rows below the header"),
        ("a.csv", "text,label\nx,y\nz,\n", "row 2 has nothing in column 'label'"),
        ("a.jsonl", "no json\n", "cannot be read as jsonl"),
        ("a.jsonl", '{"text": "x", "label": "y"}\nno json\n', "cannot be read"),
        ("a.csv", "text,label\nNA,y\n,y\n", "row 2 has nothing in column 'text'"),
        ("a.txt", "text,label\n", "a .txt file, expected one of .csv, .json, .jsonl"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        load_file(str(tmp_path / name), "text", "label")
    assert str(caught.value).startswith(str(tmp_path / name))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere.csv: no such file"):
        load_file(str(tmp_path / "nowhere.csv"), "text", "label")
