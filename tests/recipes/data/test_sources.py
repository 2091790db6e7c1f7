"""Rows from local files, and how they are named."""

import gzip
import json

import pytest
from datasets import Dataset, Features, Value

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import BadRow, encode_rows
from hf_zero.recipes.data.sources import check_sources, load_rows
from hf_zero.recipes.tasks import SourceArguments


ROWS = [{"text": "one, two", "label": "a"}, {"text": "NA", "label": "b"}]


def write(folder, name: str):
    path = folder / name
    lines = [json.dumps(row) for row in ROWS]
    if name.endswith((".jsonl", "lines.json")):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif name.endswith((".csv", ".tsv")):
        separator = "," if name.endswith(".csv") else "\t"
        path.write_text(f'text{separator}label\n"one, two"{separator}a\nNA{separator}b\n', encoding="utf-8")
    elif name.endswith(".parquet"):
        Dataset.from_list(ROWS).to_parquet(path)
    return str(path)


def take(row):
    if not isinstance(row.get("text"), str):
        raise BadRow(f"column 'text' is {row.get('text')!r}, expected a text")
    return {"text": row["text"]}


def encode(rows, skip_bad_rows=False):
    features = Features({"text": Value("string")})
    data, num_bad = encode_rows(rows, take, features, skip_bad_rows=skip_bad_rows)
    return [row["text"] for row in data], num_bad


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, streaming):
    arguments = SourceArguments(train_file=write(tmp_path, name), dataset_streaming=streaming)
    check_sources(arguments)
    rows = load_rows(arguments, "train")
    assert rows.columns == ["text", "label"]
    assert rows.is_stream == streaming
    assert encode(rows) == (["one, two", "NA"], 0)


def test_text_files_give_a_row_for_each_line_that_is_not_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  \ntwo\n", encoding="utf-8")
    rows = load_rows(SourceArguments(dataset_name=str(tmp_path / "a.txt")), "train")
    assert encode(rows)[0] == ["one", "two"]


def test_a_folder_has_the_splits_that_its_file_names_say(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "train.jsonl")
    (tmp_path / "data" / "test.jsonl").write_text('{"text": "of test"}\n', encoding="utf-8")
    arguments = SourceArguments(dataset_name=str(tmp_path / "data"), dataset_test_split="test")
    assert encode(load_rows(arguments, "train"))[0] == ["one, two", "NA"]
    assert encode(load_rows(arguments, "test"))[0] == ["of test"]
    arguments.dataset_test_split = "valid"
    with pytest.raises(DataError, match="split 'valid', expected one of train, test"):
        load_rows(arguments, "test")


def test_a_slice_of_several_files_keeps_the_lines_of_each(tmp_path):
    for number in range(3):
        lines = [json.dumps({"text": f"{number}.{line}"}) for line in range(4)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    arguments = SourceArguments(dataset_name=str(tmp_path), dataset_train_split="train[25%:75%]+train[11:]")
    rows = load_rows(arguments, "train")
    texts = encode(rows)[0]
    assert texts == ["0.3", "1.0", "1.1", "1.2", "1.3", "2.0", "2.3"]
    assert [rows.where(index, raw) for index, raw in enumerate(rows.data)] == [
        f"{tmp_path}/{text[0]}.jsonl: line {int(text[2]) + 1}" for text in texts
    ]


def test_max_rows_and_no_test_split(tmp_path):
    arguments = SourceArguments(train_file=write(tmp_path, "a.jsonl"), max_train_rows=1)
    assert encode(load_rows(arguments, "train"))[0] == ["one, two"]
    assert load_rows(arguments, "test") is None


BAD = '{"text": "good"}\n\n{"text": \n[1]\n{"text": 5}\n{"text": "also"}\n'


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_lines_are_named_or_left_out(tmp_path, streaming):
    file = tmp_path / "bad.jsonl"
    file.write_text(BAD, encoding="utf-8")
    arguments = SourceArguments(train_file=str(file), dataset_streaming=streaming)
    rows = load_rows(arguments, "train")
    with pytest.raises(DataError, match=r"bad.jsonl: line 3: not JSON .*--skip_bad_rows"):
        encode(rows)
    texts, num_bad = encode(rows, skip_bad_rows=True)
    assert texts == ["good", "also"]
    assert num_bad == (0 if streaming else 3)


def test_a_file_that_changed_is_read_again(tmp_path):
    arguments = SourceArguments(train_file=write(tmp_path, "a.jsonl"))
    assert len(encode(load_rows(arguments, "train"))[0]) == 2
    (tmp_path / "a.jsonl").write_text('{"text": "other"}\n', encoding="utf-8")
    assert encode(load_rows(arguments, "train"))[0] == ["other"]


def test_rows_of_csv_with_too_many_fields_are_named_or_counted(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('text,label\n"x\nx",y\n\na,b,c\nz\n', encoding="utf-8")
    arguments = SourceArguments(train_file=str(file))
    with pytest.raises(DataError, match="a.csv: line 5: 3 fields, expected 2, one for each column; quote texts"):
        encode(load_rows(arguments, "train"))
    assert encode(load_rows(arguments, "train"), skip_bad_rows=True) == (["x\nx", "z"], 1)
    arguments.dataset_streaming = True
    assert encode(load_rows(arguments, "train"), skip_bad_rows=True) == (["x\nx", "z"], 0)  # of a stream none are


@pytest.mark.parametrize("streaming", [False, True])
def test_no_type_is_guessed(tmp_path, streaming):
    """Of a table all fields are texts; of JSON all values are what they are there."""
    dates = [{"text": "2024-01-01", "n": 1, "call": {"a": 1, "b": None}}, {"text": "2024-01-02", "call": {"c": 1}}]
    (tmp_path / "a.json").write_text(json.dumps(dates), encoding="utf-8")
    table, texts = "text,n\n003,1e3\ntrue,\n", [{"text": "003", "n": "1e3"}, {"text": "true", "n": ""}]
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.csv.gz").write_bytes(gzip.compress(table.encode()))
    names = ("a.csv", "folder", "folder/train.csv.gz")
    for name, wanted in {"a.json": dates, **dict.fromkeys(names, texts)}.items():
        rows = load_rows(SourceArguments(dataset_name=str(tmp_path / name), dataset_streaming=streaming), "train")
        assert list(rows.good()) == wanted


def test_rows_of_parquet_lose_the_keys_that_other_rows_have(tmp_path):
    rows = [
        {"text": "a", "calls": [{"arguments": {"x": 1}}]},
        {"text": None, "calls": [{"arguments": {"y": [{"z": 1}]}}]},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert list(load_rows(SourceArguments(train_file=str(tmp_path / "a.parquet")), "train").good()) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl: no rows, expected one at least"),
        ("a.jsonl", "\n\n", "a.jsonl: no rows, expected one at least"),
        ("a.jsonl", "no json\n", "a.jsonl: line 1: not JSON"),
        ("a.csv", "text,label\n", "a.csv: no rows, expected one at least"),
        ("a.csv", "text,label\nÄ,a\n".encode("latin-1"), "a.csv: byte 0xc4 is not UTF-8, .*; save it as UTF-8"),
        ("a.csv", "text;label\na, b;c\n", "a.csv: ';' separates its columns, expected ','; save it with ','"),
        ("a.csv", '"text";"label"\n"a, b";"c"\n', "a.csv: ';' separates its columns, expected ','"),
        ("a.csv", "text|label\na|b\n", r"a.csv: '\|' separates its columns, expected ','; save it with ','"),
        ("a.csv", '"text, cleaned"\n', "a.csv: no rows, expected one at least"),  # one name
        ("a.tsv", "text,label\na,b\n", r"a.tsv: ',' separates its columns, expected '\\t'; save it with '\\t'"),
        ("a.csv", 'text,label\na,"b\n', "a.csv: line 2: unexpected end of data"),
        ("a.json", "[]", "a.json: no rows"),
        ("a.json", '{\n"text": "Hi"}', "a.json: line 1: not JSON"),
        ("a.json", "[{]", "a.json: cannot be read"),
        ("a.jsonl", b"\xff\xfe\x00", "a.jsonl: byte 0xff is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"[1]", mtime=0), "a.jsonl.gz: line 1: a JSON list, expected an object"),
        ("a.jsonl.gz", '{"text": "a"}', "a.jsonl.gz: cannot be read .Not a gzipped file"),
    ],
)
def test_a_file_without_good_rows_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        load_rows(SourceArguments(train_file=str(tmp_path / name)), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "data: none is given to train on; give --dataset_name or --train_file"),
        ({"train_file": "nowhere.csv"}, "nowhere.csv: no such file; check train_file"),
        ({"dataset_name": "./nowhere"}, "./nowhere: no such file; check dataset_name"),
        ({"dataset_name": "a/b", "train_file": "x"}, "dataset_name .a/b. and train_file .x. are both given"),
        ({"dataset_name": "a/b", "max_train_rows": 0}, "max_train_rows 0: expected 1 or more"),
        ({"dataset_name": __file__}, "a .py file, expected one of .jsonl"),
    ],
)
def test_what_cannot_be_a_source_is_refused_before_anything_is_read(given, message):
    with pytest.raises(ConfigError, match=message):
        check_sources(SourceArguments(**given))


def test_a_data_set_that_is_not_on_the_hub_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing, split train: cannot be read") as caught:
        load_rows(SourceArguments(dataset_name="nobody/nothing"), "train")
    assert "\n" not in str(caught.value)


def test_a_folder_that_datasets_has_a_loader_for_is_read_with_it(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "data").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "data" / "train.arrow")
    rows = load_rows(SourceArguments(dataset_name=str(tmp_path / "data")), "train")
    assert encode(rows)[0] == ["one, two", "NA"]
    assert rows.where(1, rows.data[1]) == f"{tmp_path}/data, split train: row 2"
