"""Several data sets, each read and tokenized as it would be alone, in one order."""

import json
import math
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset, interleave_datasets
from trl import DatasetMixtureConfig, get_dataset

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.sources import MixtureArguments, check_mixture, load_each, mix
from hf_zero.recipes.output_dir import resolved_text
from hf_zero.recipes.report import without_folders
from hf_zero.recipes.run_config import RunConfig
from tests.distributed import RemoteError, ranks, run_ranks
from tests.recipes.data.conftest import chats, completions
from tests.recipes.data.tasks import run
from tests.recipes.preferences import write_rows


SEED = SimpleNamespace(seed=3, data_seed=None, train_sampling_strategy="sequential")
ROWS = {
    "texts": [{"text": f"Text {number}"} for number in range(5)],
    "chats": chats()[:6],
    "asked": completions()[:7],
    "alpaca": [{"instruction": "Say it", "output": f"It is {number}"} for number in range(3)],
    "ids": [{"input_ids": [*range(7, number)], "labels": [-100, *range(8, number)]} for number in range(9, 14)],
}


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    return {name: str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name, rows in ROWS.items()}


def mixed(arguments: MixtureArguments) -> list[int]:
    parts = [Dataset.from_dict({"n": range(start, stop)}) for start, stop in ((0, 10), (10, 16), (100, 140))]
    return mix(parts[: len(arguments.datasets)], arguments, SEED)["n"][:]


@pytest.mark.quick
def test_data_sets_come_from_yaml_or_the_command_line_and_the_run_is_repeated_with_them(tmp_path, files):
    entries = [{"path": files["texts"], "fraction": 0.5}, {"path": "org/name", "split": "train[:9]", "fraction": 2}]
    (tmp_path / "date.yaml").write_text("datasets: [{path: org/name, name: 2024-01-31}]")  # a date, as YAML reads it
    dated = RunConfig.parse("sft", ["--config", str(tmp_path / "date.yaml")]).arguments.datasets
    assert dated == [{"path": "org/name", "name": "2024-01-31"}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"datasets": entries, "dataset_mixing": "interleave"}))
    settings = RunConfig.parse("sft", ["--config", str(tmp_path / "run.yaml"), "--output_dir=out"])
    assert settings.arguments.datasets == entries
    of_json = ["--datasets", *map(json.dumps, entries), "--dataset_mixing=interleave", "--output_dir=out"]
    assert RunConfig.parse("sft", of_json).values() == settings.values()
    (tmp_path / "resolved.yaml").write_text(resolved_text(settings))
    assert RunConfig.parse("sft", ["--config", str(tmp_path / "resolved.yaml")]).values() == settings.values()
    paths = RunConfig.parse("dpo", ["--datasets", files["texts"], "org/name"]).arguments.datasets
    assert paths == [{"path": files["texts"]}, {"path": "org/name"}]
    assert without_folders(f"{files['texts']}: 5 rows", settings.non_default()) == "texts.jsonl: 5 rows"


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"datasets": [{"name": "en"}]}, "datasets {'name': 'en'}: no path; give a hub id"),
        ({"datasets": [{"path": "a/b", "weight": 1}]}, "datasets, a key of a/b: 'weight' is not one of path, name"),
        ({"datasets": [{"path": "a/b", "fraction": 0}]}, "fraction of a/b is 0, expected a number above 0"),
        ({"datasets": [{"path": "a/b", "fraction": math.nan}]}, "fraction of a/b is nan, expected a number above 0"),
        ({"datasets": [{"path": "a/b", "columns": "text"}]}, "columns of a/b is 'text', expected a list of names"),
        ({"datasets": ['{"path": ']}, "not JSON"),
        ({"datasets": ["a/b"], "dataset_name": "c/d"}, "dataset_name: has no effect beside datasets; give path"),
        (
            {"datasets": ["a/b"], "dataset_test_split": "test"},
            "dataset_test_split: has no effect beside datasets; .*test rows as test_file",
        ),
        ({"datasets": [{"path": "a/b", "fraction": 1}, "c/d"]}, "some have a fraction, and some have none"),
        (
            {"datasets": [{"path": "a/b", "fraction": 1}], "dataset_streaming": True},
            "how many rows the fraction of a stream",
        ),
        ({"datasets": ["a/b"], "dataset_stopping_strategy": "all_exhausted"}, "of dataset_mixing interleave"),
        ({"dataset_name": "a/b", "dataset_mixing": "interleave"}, "several data sets are; give them as datasets"),
        ({"datasets": ["./nowhere.jsonl"]}, "./nowhere.jsonl: no such file; check datasets"),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_anything_is_read(given, message):
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        check_mixture(MixtureArguments(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("fractions", [(), (0.5, 0.2, 2)])
def test_data_sets_behind_each_other_are_those_of_trl(tmp_path, fractions):
    rows = {str(count): [{"text": f"{number} of {count}"} for number in range(count)] for count in (5, 7, 3)}
    files = [str(write_rows(tmp_path / f"{name}.jsonl", found)) for name, found in rows.items()]
    entries = [{"path": file} for file in files]
    theirs = [{"path": "json", "data_files": file} for file in files]
    for fraction, entry, their in zip(fractions, entries, theirs, strict=False):
        entry["fraction"] = their["fraction"] = fraction
    arguments = MixtureArguments(datasets=entries)
    check_mixture(arguments)
    parts = [Dataset.from_list(found) for found in rows.values()]
    expected = get_dataset(DatasetMixtureConfig(datasets=theirs))["train"]
    assert mix(parts, arguments, SEED).to_list() == expected.to_list()


def test_data_sets_are_interleaved_by_weight_and_seed():
    entries = [{"path": "a/a", "fraction": 3}, {"path": "b/b", "fraction": 1}]
    parts = [Dataset.from_dict({"n": range(0, 10)}), Dataset.from_dict({"n": range(10, 16)})]
    for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement"):
        arguments = MixtureArguments(datasets=entries, dataset_mixing="interleave", dataset_stopping_strategy=strategy)
        found = mixed(arguments)
        assert found == interleave_datasets(parts, [0.75, 0.25], seed=3, stopping_strategy=strategy)["n"][:]
    streams = [part.to_iterable_dataset() for part in parts]
    again = [row["n"] for row in mix(streams, arguments, SEED)]
    assert sorted(again) == sorted(found) and again != found[: len(again)] or again == found


def test_a_data_set_has_its_columns_and_its_lines(files):
    arguments = MixtureArguments(datasets=[{"path": files["ids"], "columns": ["input_ids"]}, files["texts"]])
    ids, texts = load_each(arguments)
    assert ids.columns == ["input_ids"] and list(ids.read(ids.data[1])) == ["input_ids"]
    assert texts.where(2, texts.data[2]) == f"{files['texts']}: line 3"
    with pytest.raises(DataError, match="column expected 'other'"):
        load_each(MixtureArguments(datasets=[{"path": files["ids"], "columns": ["other"]}]))


@pytest.mark.parametrize("how", [[], ["--dataset_streaming", "--train_sampling_strategy", "sequential"]])
@ranks(1)
def test_rows_of_all_formats_are_tokenized_in_a_mixture_as_they_are_alone(
    files, cache, language_models, tmp_path, how
):
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--max_length", "40", "--max_steps", "2"]
    argv += ["--output_dir", str(tmp_path / "out"), *how]
    alone = [run("sft", cache, [*argv, "--train_file", file], "data") for file in files.values()]
    found = run("sft", cache, [*argv, "--datasets", *files.values()], "data")
    # a stream is read again and again
    expected = [row for each, rows in zip(alone, ROWS.values()) for row in each["rows"][: len(rows)]]
    assert len(expected) == sum(map(len, ROWS.values()))
    for row, own in zip(found["rows"], expected):
        assert (row["input_ids"], row["labels"]) == (own["input_ids"], own["labels"])
    assert sum("the loss counts" in note for note in found["notes"]) == len(files) + (not how)


def test_a_bad_row_of_a_mixture_is_named_by_its_file_and_line(files, cache, language_models, tmp_path):
    bad = write_rows(tmp_path / "bad.jsonl", [*ROWS["asked"], {"prompt": "a", "completion": 5}])
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--datasets", files["texts"], str(bad)]
    argv += ["--output_dir", str(tmp_path / "out"), "--max_length", "40"]
    with pytest.raises(
        RemoteError, match=f"bad.jsonl: line {len(ROWS['asked']) + 1}: column 'completion' holds a int"
    ):
        run_ranks(run, 1, "sft", cache, argv, "data")


def test_preferences_are_mixed_with_their_like(cache, language_models, tmp_path):
    rows = [{"prompt": f"Say {n}", "chosen": f" yes {n}", "rejected": f" no {n}"} for n in range(4)]
    user = {"role": "user", "content": "Hi"}
    chat = {"chosen": [user, {"role": "assistant", "content": "a"}]}
    chat["rejected"] = [user, {"role": "assistant", "content": "b"}]
    paths = [write_rows(tmp_path / f"{n}.jsonl", found) for n, found in enumerate((rows[:2], rows[2:], [chat]))]
    argv = ["--model_name_or_path", str(language_models["Llama"]), "--output_dir", str(tmp_path / "out")]
    argv += ["--max_length", "40", "--datasets"]
    found = run_ranks(run, 1, "dpo", cache, [*argv, *map(str, paths[:2])], "data")[0]
    assert len(found["rows"]) == 4
    with pytest.raises(RemoteError, match="DataError: datasets: .*; 2.jsonl has .*; mix data sets of one"):
        run_ranks(run, 1, "dpo", cache, [*argv, *map(str, paths)], "data")
