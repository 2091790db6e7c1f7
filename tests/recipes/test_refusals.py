"""What cannot work is refused in one line, before a process is started or a model is loaded, and leaves nothing
behind."""

import errno
import os
import re
import shutil

import pytest

from hf_zero import ZeroTrainingArguments
from hf_zero.accelerator.environment import LAUNCHER_VARIABLES
from hf_zero.errors import ConfigError, size_text
from hf_zero.recipes import launch
from hf_zero.recipes.cli import main
from hf_zero.recipes.lora import TrainedArguments, adapt, check_trained
from hf_zero.recipes.run_config import RunConfig, make_parser
from hf_zero.trainer import checks
from tests.recipes.cases import REWARDS


@pytest.fixture
def refusal(tmp_path, tiny_model, tiny_llama, csv_file, monkeypatch, capsys):
    """Calls the command line of a task with good arguments and some bad ones; gives the exit code and the line."""
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("hf_zero.recipes.run.run_task", lambda *_: pytest.fail("the run was started"))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_: pytest.fail("a model was loaded"))
    for name in (*LAUNCHER_VARIABLES, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def call(task: str, *bad: str, **environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        own = {"grpo": "--max_completion_length=16", "distill": "--max_completion_length=16"}
        good = [f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", "--gradient_checkpointing=false"]
        good += [own.get(task, "--max_length=64"), "--output_dir=out"]
        code = main([task, *good, *(flag.replace("LLAMA", str(tiny_llama)) for flag in bad)])
        output = capsys.readouterr()
        rank = f", rank {environment['RANK']}" if "RANK" in environment else ""
        assert output.out == "" and output.err.startswith(f"hf-zero{rank}: ") and output.err.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
        return code, output.err.removeprefix(f"hf-zero{rank}: ").rstrip("\n")

    return call


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
WEIGHTS = ["--use_peft", "--load_in_4bit"]
JUDGED = ["--reward_funcs=rewards.py:short"]
STREAM = ["--dataset_streaming", "--max_steps=3"]
# Task, flags, and a pattern that the line has.
SETTINGS = [
    *(("pretrain", [f"--{name}={value}"], re.escape(message)) for name, value, message in ARGUMENTS),
    ("classify", ["--zero_stage=7"], "zero_stage: 7 is not one of 0, 1, 2, 3; the nearest is '3'"),
    ("classify", ["--zero_stage=three"], "invalid int value: 'three'"),
    ("classify", ["--zero_reduce_dtype=bf8"], "zero_reduce_dtype: 'bf8' is not one of fp32, bf16, int8$"),
    ("classify", ["--fsdp=full_shard"], "^--fsdp: cannot be combined with .*; remove it and use --zero_stage"),
    ("classify", ["--deepspeed=ds.json"], "^--deepspeed: cannot be combined with hf_zero, which does the sharding"),
    ("classify", ["--model_name_or_path=./nowhere"], "model_name_or_path './nowhere': no such folder"),
    ("classify", ["--model_name_or_path="], "model_name_or_path: not set"),
    ("classify", ["--dataset_name=python_docstrings"], "data: dataset_name 'python_docstrings' and train_file "),
    ("classify", ["--max_length=1"], "max_length 1: expected 8 or more"),
    ("classify", ["--num_processes=0"], "--num_processes 0: expected 1 or more"),
    ("classify", ["--learning_rat=1"], r"did you mean --learning_rate\?"),
    ("classify", ["--lr_scheduler_type=warmup_stable_decay"], "^lr_scheduler_type warmup_stable_decay: .*decay_steps"),
    ("classify", ["--compute_metrics=accuracy"], "compute_metrics 'accuracy': expected file.py:function"),
    ("classify", ["--compute_metrics=none.py:f"], "compute_metrics .*there is no file none.py; give where it is"),
    ("classify", ["--compute_metrics=rewards.py:f"], "has no function 'f'; give the name of one"),
    ("classify", ["--freeze=bert.embeddings", "--use_peft"], "freeze: with use_peft the model is frozen"),
    ("classify", ["--freeze", "*", "layer.[0-15]"], r"freeze 'layer.\[0-15\]': \[ \] stands for one letter, never"),
    ("classify", ["--unfreeze=classifier"], "unfreeze: nothing is frozen that could be trained; give --freeze too"),
    ("classify", ["--output_dir=rewards.py/out"], r"rewards.py is not writable \(Not a directory\)"),
    *((task, ["--max_length=65"], "max_length 65: .* has 64 positions; set") for task in ("sft", "pretrain", "dpo")),
    *((task, ["--dataset_streaming"], "number of rows is not known; set --max_steps") for task in ("sft", "dpo")),
    ("sft", [*STREAM, "--dataloader_num_workers=2"], "dataloader_num_workers 2: one worker reads a stream"),
    ("sft", [*STREAM, "--train_sampling_strategy=group_by_length"], "group_by_length: the lengths of a stream"),
    ("sft", ["--model_revision=main"], "model_revision 'main': .* is a folder, which has no revisions"),
    ("sft", ["--dataset_config=en"], "dataset_config: .*rows.csv is a file, which has no configurations"),
    ("sft", ["--dataset_format=sharegpt"], "dataset[-_]format: invalid choice: 'sharegpt'"),
    ("sft", ["--dataset_shuffle_buffer=0"], "dataset_shuffle_buffer 0: expected 1 or more"),
    ("sft", ["--dataset_kwargs=skip"], "dataset_kwargs 'skip': not JSON .*; give a mapping"),
    ("sft", ["--dataset_kwargs=[1]"], r"dataset_kwargs '\[1\]': a list, expected a mapping"),
    ("sft", ['--dataset_kwargs={"skip_prepare_dataset": true}'], "dataset_kwargs: rows with input_ids are known to"),
    ("sft", ["--chat_template_path=nowhere.jinja"], "chat_template_path nowhere.jinja: cannot be read"),
    ("sft", ["--eval_packing=true"], "eval_packing: test rows are packed as training rows are; add --packing"),
    ("sft", ["--max_length=1"], "max_length 1: expected 2 or more"),
    ("sft", ["--dtype=fp8"], "dtype: invalid choice: 'fp8'"),
    ("sft", ["--use_peft", "--lora_r=0"], "lora_r 0: expected 1 or more"),
    ("sft", ["--use_dora"], "use_dora: describes an adapter, and none is trained"),
    ("sft", ["--load_in_4bit"], "quantized weights are not trained; add --use_peft"),
    ("sft", [*WEIGHTS, "--load_in_8bit"], "load_in_4bit and load_in_8bit are both given"),
    ("sft", [*WEIGHTS, "--bnb_4bit_quant_type=int4"], "quant[-_]type: invalid choice: 'int4'"),
    ("sft", ["--use_peft", "--use_bnb_nested_quant"], "use_bnb_nested_quant: describes a model in 4 bits; add --load"),
    ("sft", ["--zero_offload=optimizer", "--zero_offload_dir=none"], r"'none': not writable \(No such file .*create"),
    ("sft", ["--zero_offload_activations", "--activation_offloading"], "^activation_offloading: offloads the same"),
    *(
        ("sft", [flag], "there is no test set to evaluate on; give --dataset_test_split")
        for flag in ("--eval_strategy=steps", "--eval_on_start=true")
    ),
    (
        *("sft", ["--load_best_model_at_end=true", "--save_strategy=no"]),
        "^load_best_model_at_end: there is no test set to evaluate on",
    ),
    # groups that the ranks do not form; rows are made ready by one process
    (
        "sft",
        ["--zero_shard_size=3", "--num_processes=4"],
        r"^zero_shard_size: 4 ranks .* \(1, 2, 4\), auto",
    ),
    ("sft", ["--zero_shard_size=2"], "1 rank cannot form groups of 2; give a divisor of 1"),
    ("sft", ["--zero_shard_size=2", "--preprocess", "--samples=-1"], "^samples -1: "),
    (
        "sft",
        ["--zero_sequence_parallel=3", "--num_processes=4"],
        "^zero_sequence_parallel: 4 ranks cannot form",
    ),
    ("sft", ["--zero_sequence_parallel=0"], "sequence_parallel: 0 is not a number of ranks; give 1"),
    *(
        (task, ["--zero_sequence_parallel=2", "--num_processes=2"], f"the loss of {task} is computed from whole seq")
        for task in ("dpo", "kto", "classify")
    ),
    ("grpo", [], "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function"),
    ("grpo", ["--reward_funcs=nice"], "reward_funcs 'nice': expected one of accuracy_reward"),
    ("grpo", ["--reward_funcs=none.py:short"], "reward_funcs none.py:short: there is no file none.py"),
    ("grpo", ["--reward_funcs=rewards.py:nothing"], "rewards.py has no function 'nothing'"),
    (
        "grpo",
        [*JUDGED, "--model_revision=v1", "--beta=0.1"],
        "model_revision v1: TRL loads the reference model",
    ),
    ("grpo", [*JUDGED, "--max_completion_length=64"], "max_completion_length 64: .* has 64 positions"),
    ("grpo", [*JUDGED, "--dataset_streaming", "--max_steps=3"], "dataset_streaming: prompts are drawn"),
    ("grpo", ["--reward_model_name_or_path=./none"], "reward_model_name_or_path"),
    ("grpo", ["--reward_model_name_or_path=LLAMA"], "is a LlamaForCausalLM, which gives no score"),
    ("distill", [], "teacher_model_name_or_path: is missing"),
    ("reward", ["--label_smoothing_factor=0.1"], "label_smoothing_factor: has no effect; leave it out"),
    ("dpo", ["--label_smoothing_factor=0.1"], "label_smoothing_factor: has no effect; give label_smoothing"),
    ("dpo", ['--model_init_kwargs={"dtype": "auto"}'], "model_init_kwargs: has no effect"),
]


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize(("task", "bad", "message"), SETTINGS)
def test_settings_that_cannot_work_are_refused(refusal, task, bad, message):
    code, line = refusal(task, *bad)
    assert code == 2 and re.search(message, line), line


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("bad", "environment", "message"),
    [
        ([], {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ([], {**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not a number of processes"),
        ([], {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP: cannot be combined with hf_zero"),
        ([], {"ACCELERATE_USE_DEEPSPEED": "1"}, "ACCELERATE_USE_DEEPSPEED: cannot be combined with hf_zero"),
        (["--num_processes=3"], TORCHRUN, "--num_processes 3, but the launcher set WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_contradicts_is_refused(refusal, bad, environment, message):
    code, line = refusal("classify", *bad, **environment)
    assert code == 2 and message in line


def test_a_folder_that_refuses_a_file_is_no_output_dir_whatever_its_mode_says(refusal, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    for folder in ("out", "new/folder"):
        code, line = refusal("sft", f"--output_dir={folder}")
        assert code == 2 and "is not writable (Read-only file system); choose another folder" in line


def test_a_column_that_is_missing_and_a_truncated_model_are_refused(refusal, csv_file, tiny_model, tmp_path_factory):
    code, line = refusal("classify", "--label_column=topic")
    assert code == 1 and f"{csv_file}: columns found ['text', 'label'], column expected 'topic'" in line
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("truncated") / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    code, line = refusal("classify", f"--model_name_or_path={folder}")
    assert code == 1 and "truncated, damaged, or not a safetensors file" in line


# In scripts


def refused(**given) -> str:
    """What a script is told, in one line."""
    with pytest.raises(ConfigError) as caught:
        ZeroTrainingArguments(**{"output_dir": "out", "use_cpu": True, **given})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "value", "message"), ARGUMENTS)
def test_an_argument_that_cannot_work_is_refused_in_a_script(name, value, message):
    kind = next(action.type for action in make_parser("pretrain")._actions if action.dest == name)
    assert message in refused(**{name: kind(value)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tf32": True}, "--tf32 requires"),
        ({"logging_steps": 0}, "requires non-zero --logging_steps"),
        ({"load_best_model_at_end": True}, "--load_best_model_at_end requires the save and eval strategy to match"),
        ({"dataloader_prefetch_factor": 2}, "--dataloader_prefetch_factor can only be set when"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau requires an eval strategy"),
    ],
)
def test_what_transformers_refuses_is_one_line_of_ours(given, message):
    assert message in refused(**given)


def test_activations_are_not_moved_where_there_is_no_accelerator():
    with pytest.raises(ConfigError, match="activation_offloading: requires an accelerator, but the run"):
        RunConfig.parse("sft", ["--activation_offloading", "--use_cpu", "--output_dir=out"]).training_arguments()


def test_an_adapter_takes_peft_and_modules_that_there_are(monkeypatch, tiny_llama):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert adapt(model, TrainedArguments()) is model
    with pytest.raises(ConfigError, match=r"lora_target_modules \['nothing'\]: Target modules"):
        adapt(model, TrainedArguments(use_peft=True, lora_target_modules=["nothing"]))
    monkeypatch.setattr("hf_zero.recipes.lora.is_peft_available", lambda: False)
    check_trained(TrainedArguments())
    with pytest.raises(ConfigError, match=r"use_peft: PEFT is not installed; pip install 'hf-zero\[peft\]'"):
        check_trained(TrainedArguments(use_peft=True))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**60, "1,048,576.0 TiB")],
)
def test_sizes_are_read_by_people(nbytes, text):
    assert size_text(nbytes) == text
