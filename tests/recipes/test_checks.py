"""Every setting that cannot work is refused in one line: before a process is started, and in scripts as well."""

import errno
import os
import re

import pytest

from hf_zero import ZeroTrainingArguments
from hf_zero.accelerator.named_settings import LAUNCHER_VARIABLES
from hf_zero.errors import ConfigError, size_text
from hf_zero.recipes import launch
from hf_zero.recipes.cli import main
from hf_zero.recipes.run_config import RunConfig, make_parser
from hf_zero.trainer import checks


# Flag and value on the command line, which is also the argument's in a script; what the line says.
ARGUMENTS = [
    ("save_steps", "0", "save_steps: 0 saves nothing; pass a positive number, or --save_strategy no"),
    ("zero_offload_dir", "nowhere", "offload_dir: requires offload, but offload is 'none'"),
    ("zero_partition_activations", "true", "gradient checkpointing is off; add --gradient_checkpointing"),
    ("zero_tiled_mlp", "0", "zero_tiled_mlp: 0 is not a number of tiles; give 1 or more, or auto"),
    ("zero_autocast", "true", "zero_autocast: requires --bf16 or --fp16, and neither is set"),
    ("optim", "galore_adamw", "optim: galore_adamw is not known to run on shards; use one of ada"),
    ("zero_bucket_mb", "0", "zero_bucket_mb: 0 is not a size; expected 1 or more (MiB), or auto"),
]
# Of the recipes alone: they know the data and the model.
OF_RECIPES = [
    ("--max_length=65", "max_length 65: .* has 64 positions; set --max_length 64 or less"),
    ("--dataset_streaming", "dataset_streaming: the number of rows is not known; set --max_steps"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(tmp_path, tiny_model, csv_file, monkeypatch, capsys):
    """Calls the command line of a task; gives the one line that it says."""
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("hf_zero.recipes.run.run_task", lambda *_: pytest.fail("the run was started"))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_: pytest.fail("a model was loaded"))

    def call(task: str, *bad: str) -> str:
        good = [
            f"--model_name_or_path={tiny_model}",
            f"--train_file={csv_file}",
            "--max_length=64",
            "--gradient_checkpointing=false",
        ]
        assert main([task, *good, "--output_dir=out", *bad]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
        return output.err.removeprefix("hf-zero: ").rstrip("\n")

    return call


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(("name", "value", "message"), ARGUMENTS)
def test_an_argument_that_cannot_work_is_refused_by_the_command_line(refusal, name, value, message):
    assert message in refusal("pretrain", f"--{name}={value}")


@pytest.mark.parametrize(("name", "value", "message"), ARGUMENTS)
def test_an_argument_that_cannot_work_is_refused_in_a_script(name, value, message):
    kind = next(action.type for action in make_parser("pretrain")._actions if action.dest == name)
    assert message in _refused(**{name: kind(value)})


def _refused(**given) -> str:
    """What a script is told, in one line."""
    with pytest.raises(ConfigError) as caught:
        ZeroTrainingArguments(**{"output_dir": "out", "use_cpu": True, **given})
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What transformers itself refuses, in its own words.
OF_TRANSFORMERS = [
    ({"tf32": True}, "--tf32 requires"),
    ({"logging_steps": 0}, "requires non-zero --logging_steps"),
    ({"load_best_model_at_end": True}, "--load_best_model_at_end requires the save and eval strategy to match"),
    ({"dataloader_prefetch_factor": 2}, "--dataloader_prefetch_factor can only be set when"),
    (
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        "reduce_lr_on_plateau requires an eval strategy",
    ),
]


@pytest.mark.parametrize(("given", "message"), OF_TRANSFORMERS)
def test_what_transformers_refuses_is_one_line_of_ours(given, message):
    assert message in _refused(**given)


def test_an_offload_folder_that_is_missing_is_refused(refusal):
    assert "zero_offload_dir 'nowhere': not writable (No such file or directory); create it" in refusal(
        "sft", "--zero_offload=optimizer", "--zero_offload_dir=nowhere"
    )


def test_shard_groups_that_the_ranks_do_not_form_are_refused(refusal):
    line = refusal("sft", "--zero_shard_size=3", "--num_processes=4")
    assert line.startswith("zero_shard_size: 4 ranks cannot form groups of 3; give a divisor of 4 (1, 2, 4), auto")
    assert "1 rank cannot form groups of 2; give a divisor of 1" in refusal("sft", "--zero_shard_size=2")
    line = refusal("sft", "--zero_shard_size=2", "--preprocess", "--samples=-1")  # rows are made ready by one process
    assert line.startswith("samples -1: ")


def test_sequence_groups_that_the_ranks_do_not_form_are_refused(refusal):
    line = refusal("sft", "--zero_sequence_parallel=3", "--num_processes=4")
    assert line.startswith("zero_sequence_parallel: 4 ranks cannot form groups of 3; give a divisor of 4 (1, 2, 4)")
    assert "sequence_parallel: 0 is not a number of ranks; give 1" in refusal("sft", "--zero_sequence_parallel=0")
    for task in ("dpo", "kto", "classify"):
        line = refusal(task, "--zero_sequence_parallel=2", "--num_processes=2")
        assert line.startswith(f"zero_sequence_parallel: the loss of {task} is computed from whole sequences; leave")


def test_a_folder_that_refuses_a_file_is_no_output_dir_whatever_its_mode_says(refusal, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert "is not writable (Read-only file system); choose another folder" in refusal("sft")


def test_activations_are_moved_once_and_off_an_accelerator(refusal):
    with pytest.raises(ConfigError, match="activation_offloading: requires an accelerator, but the run"):
        RunConfig.parse("sft", ["--activation_offloading", "--use_cpu", "--output_dir=out"]).training_arguments()
    line = refusal("sft", "--zero_offload_activations", "--activation_offloading")
    assert line.startswith("activation_offloading: offloads the same tensors as zero_offload_activations; use one")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**60, "1,048,576.0 TiB")],
)
def test_sizes_are_read_by_people(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize("task", ["sft", "pretrain", "dpo"])
@pytest.mark.parametrize(("flag", "message"), OF_RECIPES)
def test_what_only_a_recipe_knows_is_refused_by_every_task(refusal, task, flag, message):
    assert re.match(message, refusal(task, flag))
