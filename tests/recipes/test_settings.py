"""Command line over YAML over defaults."""

from pathlib import Path

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.run_config import RunConfig


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("task", "text", "argv", "found"),
    [
        (  # the command line wins over the file, and the file over the defaults
            *("classify", "learning_rate: 1e-3\nmax_length: 32\nzero_stage: 1\n"),
            ["--zero_stage", "2", "--max-length", "48"],
            {"learning_rate": 1e-3, "zero_stage": 2, "max_length": 48, "text_column": "text", "num_processes": None},
        ),
        (
            *("classify", "bf16: true\nlr_scheduler_kwargs: {num_cycles: 2}\nlabel_names: [labels, more]\n"),
            [],
            {"bf16": True, "lr_scheduler_kwargs": {"num_cycles": 2}, "label_names": ["labels", "more"]},
        ),
        (
            *("classify", "weight_decay: -0.5\nnum_processes: 4\ntext_column: 'two words'\nwarmup_steps:\n", []),
            {"weight_decay": -0.5, "num_processes": 4, "text_column": "two words", "warmup_steps": 0},
        ),
        (  # words that YAML takes for true or false stay words where a text is wanted, in lists and merged lines, too
            *(
                "classify",
                "save_strategy: no\neval_strategy: no\nrun_name: no\nhub_model_id: on\nbf16: on\nfp16: no\n",
            ),
            [],
            {"save_strategy": "no", "eval_strategy": "no", "run_name": "no", "hub_model_id": "on"}
            | {"bf16": True, "fp16": False},
        ),
        (
            *("classify", "<<: {save_strategy: no, run_name: off, bf16: no}\nlabel_names: [no, Yes, label]\n", []),
            {"label_names": ["no", "Yes", "label"], "save_strategy": "no", "run_name": "off", "bf16": False},
        ),
        (  # and so do numbers and dates
            *("classify", "run_name: 2024_11_27\nmodel_revision: 0123456\nlabel_names: [1_0, 2024-11-27]\n", []),
            {"run_name": "2024_11_27", "model_revision": "0123456", "label_names": ["1_0", "2024-11-27"]},
        ),
        # null is no limit of length where TRL has it, and the default elsewhere
        ("sft", "max_length: null\n", [], {"max_length": None}),
        ("sft", "max_length: null\n", ["--max_length", "64"], {"max_length": 64}),
        ("classify", "max_length: null\n", [], {"max_length": 128}),
        *(("sft", f"max_length: '{word}'\n", [], {"max_length": None}) for word in ("none", "null")),
        *(("sft", "", [f"--max_length={word}"], {"max_length": None}) for word in ("none", "null")),
        # items of a list may look like flags
        ("classify", "label_names: [-first, --bf16, third]\n", [], {"label_names": ["-first", "--bf16", "third"]}),
        ("classify", "label_names: [-first]\nreport_to: [none]\n", ["--label_names", "x"], {"label_names": ["x"]}),
    ],
)
def test_values_come_from_the_command_line_the_file_and_the_defaults(tmp_path, task, text, argv, found):
    values = RunConfig.parse(task, ["--config", write_yaml(tmp_path, text), *argv]).values()
    assert {key: values[key] for key in found} == found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", r"unknown key 'learning_rat'; did you mean learning_rate\?"),
        ("zero_stages: 1\n", r"unknown key 'zero_stages'; did you mean zero_stage\?"),
        (
            "lr: 1\nstage: sft\n",
            "unknown key 'lr'; use learning_rate; .*unknown key 'stage'; use the task, as in .*, or zero_stage",
        ),
        ("1: 1\n", "unknown key '1'; nothing here is called like it"),
        ("max_seq_length: 1\n", "unknown key 'max_seq_length'; use max_length"),
        ("- a\n- b\n", "a list at the top"),
        ("a: b: c\n", "not valid YAML .* line 1"),
        ("max_length: long\n", "--config .*recipe.yaml: .*max_length.*invalid int value: 'long'"),
        ("bf16: perhaps\n", "--config .*recipe.yaml: .*Truthy value expected: got perhaps"),
        ("learning_rate: [1, 2]\n", "--config .*recipe.yaml: .*"),
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
        (["--max_length", "long"], "^argument --max_length"),
        (["--config"], "expected one argument"),
    ],
)
def test_a_command_line_with_a_mistake_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse("classify", argv)


def test_unknown_keys_of_the_file_and_of_the_command_line_are_told_together(tmp_path):
    path = write_yaml(tmp_path, "learning_rat: 1\n")
    with pytest.raises(ConfigError, match="yaml: unknown key 'learning_rat'; .*; command line: unknown key '--qxz'"):
        RunConfig.parse("classify", ["--config", path, "--qxz"])


def test_a_file_for_another_task_is_refused(tmp_path):
    path = write_yaml(tmp_path, "task: sft\n")
    with pytest.raises(ConfigError, match=r"task 'sft': .*recipe.yaml is not for classify"):
        RunConfig.parse("classify", ["--config", path])


def test_the_longest_rows_are_for_plan_to_find(tmp_path):
    path = write_yaml(tmp_path, "max_length: auto\n")
    for argv in (["--max_length=auto"], ["--config", path]):
        with pytest.raises(ConfigError, match="max-length: 'auto': auto is for hf-zero plan"):
            RunConfig.parse("sft", argv)
