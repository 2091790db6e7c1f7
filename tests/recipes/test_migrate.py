"""`migrate`: every key of a DeepSpeed configuration becomes a flag that exists, or is named with the reason."""

import json
import re
from dataclasses import fields

import pytest
from transformers.trainer_utils import SchedulerType

from hf_zero.recipes.cli import EXIT_BAD_CONFIG, main
from hf_zero.recipes.migrate import dialects, migrated, rendered
from hf_zero.recipes.run_config import RunConfig
from hf_zero.trainer import ZeroTrainingArguments
from hf_zero.trainer.checks import SUPPORTED_OPTIMS


RULES = dialects()["deepspeed"].rules
UNKNOWN = "not among the keys of DeepSpeed 0.19 that are known here"
NO_CLIPPING = {"zero_stage": "0", "max_grad_norm": "0"}  # what DeepSpeed does by default, and Trainer does not
# transformers' own example for stage 3, with values for some of what it leaves to Trainer.
STAGE_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": 8,
    },
    "activation_checkpointing": {"cpu_checkpointing": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
    "aio": {"block_size": 1048576, "queue_depth": 8},
}


@pytest.mark.quick
def test_a_configuration_for_stage_3_becomes_flags():
    result = migrated(STAGE_3)
    assert result.flags == {
        "per_device_train_batch_size": "4",
        "max_grad_norm": "1.0",
        "bf16": "True",
        "zero_stage": "3",
        "zero_prefetch_units": "0",
        "zero_offload": "params",  # of the optimizer too
        "zero_offload_dir": "/nvme",
        "optim": "adamw_torch_fused",
        "adam_beta1": "0.9",
        "adam_beta2": "0.95",
        "adam_epsilon": "1e-08",
        "lr_scheduler_type": "linear",
        "learning_rate": "0.0003",
        "warmup_steps": "100",
        "gradient_checkpointing": "True",
        "zero_offload_activations": "True",
    }
    assert {path for path, text in result.always.items() if text.startswith('"auto": Trainer')} == {
        "fp16.enabled",
        "gradient_accumulation_steps",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
    }
    assert result.missing.keys() == {"fp16.loss_scale_window", "zero_optimization.zero_hpz_partition_size"}


def test_what_is_printed_is_a_command_line_that_parses(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(STAGE_3), encoding="utf-8")
    assert main(["migrate", str(path)]) == 0
    output = capsys.readouterr().out
    assert "no second copy of the parameters on each host" in output
    training = RunConfig.parse("classify", output.splitlines()[-1].split()).training
    assert training["zero_stage"] == 3
    assert training["warmup_steps"] == 100
    assert training["gradient_checkpointing"] is True
    here = {"output_dir": str(tmp_path / "out"), "zero_offload_dir": None, "use_cpu": True}
    args = ZeroTrainingArguments(**{**training, **here})
    assert args.zero_config().offload == "params"


def test_all_who_are_reported_to_stay():
    result = migrated({name: {"enabled": True} for name in ("wandb", "tensorboard", "comet")})
    assert result.sources["report_to"] == "tensorboard, wandb, comet"
    command = rendered(result).splitlines()[-1].strip()
    assert command == "--max_grad_norm 0 --zero_stage 0 --report_to tensorboard wandb comet_ml"
    assert RunConfig.parse("classify", command.split()).training["report_to"] == ["tensorboard", "wandb", "comet_ml"]


def test_every_key_is_accounted_for():
    result = migrated(STAGE_3)
    leaves = {path for path in _paths(STAGE_3) if path not in RULES or not path.startswith("aio.")}
    named = {*result.sources.values(), *result.always, *result.missing}
    named |= {"aio.block_size", "aio.queue_depth"}  # named as one section
    assert leaves <= named


def _paths(section: dict, prefix: str = "") -> set[str]:
    deeper = [_paths(value, f"{prefix}{key}.") for key, value in section.items() if isinstance(value, dict)]
    return {f"{prefix}{key}" for key, value in section.items() if not isinstance(value, dict)}.union(*deeper)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({}, {}),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": "0.5"}),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"per_device_train_batch_size": "4", "gradient_accumulation_steps": "2"},
        ),
        ({"steps_per_print": 2000}, {}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero_stage": "2", "zero_offload": "optimizer"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"fp16": "True", "zero_autocast": "True"}),
        ({"communication_data_type": "bfp16"}, {"zero_reduce_dtype": "bf16"}),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {"zero_gather_dtype": "int8", "zero_stage": "0"}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, {"zero_stage": "3"}),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, {"zero_reduce_dtype": "int8", "zero_stage": "0"}),
        ({"wandb": {"enabled": True, "project": "x"}}, {"report_to": "wandb"}),
        ({"wandb": {"enabled": False}}, {}),
        ({"fp16": {"enabled": False, "hysteresis": 2}}, {}),  # what was off is not missed
        ({"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True, "vocabulary_size": 1024}, {}),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1.0, "amp": {"enabled": False}}, {}),
        ({"scheduler": {"params": {"warmup_min_lr": "auto"}}}, {}),
        (  # what DeepSpeed does by default, and Trainer does not
            {
                "optimizer": {"type": "Lion"},
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}},
            },
            {
                **{"optim": "lion_32bit", "learning_rate": "0.001", "adam_beta1": "0.9", "adam_beta2": "0.99"},
                **{"lr_scheduler_type": "linear", "warmup_steps": "1000"},
            },
        ),
        ({"sequence_parallel_size": 4}, {"zero_sequence_parallel": "4"}),
        ({"sequence_parallel_size": 1}, {}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/nvme"}}}, {}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5}}},
            {"zero_offload": "optimizer", "zero_offload_dir": "/n", "zero_offload_fraction": "0.5"},
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1, "warmup_type": "linear"}}},
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
                "warmup_steps": "1000",
            },
        ),
    ],
)
def test_a_setting_becomes_its_flags(config, flags):
    result = migrated(config)
    assert result.flags == NO_CLIPPING | flags
    assert result.missing == {}


@pytest.mark.parametrize(
    ("config", "path", "reason"),
    [
        ({"colour": "blue"}, "colour", UNKNOWN),
        ({"zero_optimization": {"stage4": {"a": 1}}}, "zero_optimization.stage4.a", UNKNOWN),
        (  # the keys of a type that is not there are named, too
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400, "comm_backend_name": "nccl"}}},
            "optimizer.type",
            '"OneBitAdam": not among the optimizers',
        ),
        *(
            (
                {"train_batch_size": 64, **beside},
                "train_batch_size",
                "64: set --per_device_train_batch_size x processes x",
            )
            for beside in ({}, {"gradient_accumulation_steps": 2}, {"train_micro_batch_size_per_gpu": "auto"})
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            "decoupled",
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.params.betas", "not a value that"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_first_step_size": 1000}}},
            "scheduler.type",
            "not among the schedules",
        ),
        ({"fp16": {"enabled": "auto", "loss_scale": 128}}, "fp16.loss_scale", "128: the loss scale is always dynamic"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp32 or bf16"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
            "no second copy",
        ),
        ({"amp": {"enabled": True}}, "amp", "Apex"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "gradients are averaged"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "set --bf16 or --fp16"),
        ({"seq_parallel_communication_data_type": "fp16"}, "seq_parallel_communication_data_type", "own dtype"),
        *(
            (
                {"scheduler": {"type": kind, "params": {"warmup_num_steps": "auto"}}},
                "scheduler.params.warmup_type",
                '"log" (not in the file, so DeepSpeed\'s default): ',
            )
            for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
        ),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(config, path, reason):
    result = migrated(config)
    assert reason in result.missing[path]
    others = {each: found for each, found in result.missing.items() if each != path}  # of a type that is not there
    assert all(each.startswith(path.removesuffix("type")) for each in others) and UNKNOWN not in others.values()
    assert f"  {path}: " in rendered(result).split("no counterpart:")[1]


@pytest.mark.parametrize(("optimizer", "param"), [("nvme", "cpu"), ("cpu", "nvme"), (None, "cpu")])
def test_what_is_offloaded_beyond_the_file_is_printed(optimizer, param):
    where = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": "/n"}}
    zero = {"stage": 3, "offload_optimizer": where.get(optimizer, {}), "offload_param": where[param]}
    names = ("offload_optimizer", "offload_param")
    flat = {f"{name}_{key}": value for name in names for key, value in zero[name].items()}
    for config in (
        {"zero_optimization": zero},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, **flat}},
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
    ):
        lines = rendered(migrated(config)).splitlines()
        assert next(line for line in lines if line.startswith("--zero_offload params")).endswith(
            "; masters, gradients and optimizer state are offloaded too, everything to --zero_offload_dir if it is set"
        )
    off = migrated({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}})
    assert off.always["zero_optimization.offload_param.device"] == '"none": the default'


def test_every_flag_of_the_table_exists():
    known = {field.name for field in fields(ZeroTrainingArguments)}
    rules = [rule for dialect in dialects().values() for rule in dialect.rules.values()]
    named = {name for rule in rules for name in rule.flags}
    assert len(named) > 20 and named <= known
    assert set(RULES["optimizer.type"].more["values"].values()) <= SUPPORTED_OPTIMS
    assert set(RULES["scheduler.type"].more["values"].values()) <= {kind.value for kind in SchedulerType}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ds.json", None, "cannot be read (No such file"),
        ("ds.json", "{", "not valid JSON (Expecting"),
        ("ds.json", "[" * 100_000, "not valid JSON (maximum recursion depth"),
        ("ds.json", "[1]", "a list at the top, expected the keys of a configuration of DeepSpeed or accelerate"),
        ("run.yaml", "a: [1\nb: }", "not valid YAML ("),
        ("run.yaml", "base_model: org/name\nbf16: auto\n", "has 'base_model', a key of Axolotl"),
        ("run.yaml", "model_name_or_path: org/name\n", "has 'model_name_or_path', a key of LLaMA-Factory and TRL"),
        ("run.json", '{"model_name_or_path": "org/name", "stage": "sft"}', "has 'model_name_or_path', a key of"),
        ("run.yaml", "stage: sft\nfinetuning_type: lora\n", "has 'finetuning_type', a key of LLaMA-Factory"),
        ("run.json", '{"learning_rate": 1e-4}', "has the keys learning_rate, expected the keys of a configuration"),
        ("run.json", "{}", "has the keys none, expected"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(file, text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert main(["migrate", file]) == EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert error.startswith(f"hf-zero: {file}: {message}")
    assert error.count("\n") == 1


def test_a_key_that_another_one_overrules_is_told():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.1}}}
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-4, "warmup_type": "linear"}}
    result = migrated(config)
    assert result.flags["learning_rate"] == "0.0003"
    told = "2e-05: overruled by scheduler.params.warmup_max_lr, which is 0.0003"
    assert result.always["optimizer.params.lr"] == told
    text = rendered(result)
    assert f"  optimizer.params.lr: {told}" in text.split("nothing to set:")[1]
    assert re.search(r"^--weight_decay 0.1 +optimizer.params.weight_decay; biases and norms", text, re.MULTILINE)
    assert not re.search(r"^--learning_rate .*;", text, re.MULTILINE), "the other flags do what their keys do"
    config["optimizer"]["params"] = {"lr": "auto", "weight_decay": 0, "betas": "auto"}
    del config["scheduler"]["params"]["warmup_max_lr"]
    result = migrated(config)
    assert result.flags["learning_rate"] == "0.001" and "biases" not in rendered(result)
    assert result.always["optimizer.params.lr"].startswith(
        "auto: overruled by scheduler.params.warmup_max_lr, which is"
    )
    assert "--adam_beta1 and --adam_beta2 decide" in result.always["optimizer.params.betas"]


def test_where_the_file_has_a_value_or_no_section_the_default_of_it_is_not_taken():
    assert migrated({"gradient_clipping": "auto"}).flags == {"zero_stage": "0"}
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    assert migrated(given).flags["learning_rate"] == "2e-05"  # WarmupLR warms up to the optimizer's
    assert migrated({}).flags == NO_CLIPPING  # Trainer's own optimizer and schedule, by its flags


# as `accelerate config` writes it
ACCELERATE_FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP_1 = """fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
  fsdp_version: 1
"""
PARALLELISM = """parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: {cp}
  parallelism_config_cp_comm_strategy: alltoall
  parallelism_config_sp_size: {sp}
"""
DEEPSPEED_SECTION = """deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /nvme
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
"""


def _of_yaml(text: str, tmp_path, capsys) -> str:
    path = tmp_path / "default_config.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["migrate", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "section", "flags"),
    [
        ("MULTI_GPU", "", "--zero_stage 0 --bf16 True"),
        ("FSDP", "", "--bf16 True --zero_stage 3"),
        ("FSDP", "fsdp_config:\n  reshard_after_forward: false\n", "--bf16 True --zero_stage 2"),
        ("FSDP", "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "--bf16 True --zero_stage 2"),
        ("FSDP", "fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n", "--bf16 True --zero_stage 0"),
        ("DEEPSPEED", "deepspeed_config:\n  gradient_clipping: none\n", "--bf16 True --zero_stage 2"),
        (
            "FSDP",
            FSDP_1,
            "--bf16 True --zero_stage 2 --zero_offload optimizer --gradient_checkpointing True "
            "--zero_prefetch_units 0",
        ),
        (
            "DEEPSPEED",
            DEEPSPEED_SECTION,
            "--bf16 True --zero_stage 3 --gradient_accumulation_steps 4 --max_grad_norm 1.0 --zero_offload optimizer "
            "--zero_offload_dir /nvme",
        ),
        ("DEEPSPEED", "deepspeed_config: {}\n", "--bf16 True --zero_stage 2"),  # accelerate's default
        ("FSDP", PARALLELISM.format(cp=1, sp=1), "--bf16 True --zero_stage 3"),
        ("FSDP", PARALLELISM.format(cp=4, sp=1), "--bf16 True --zero_stage 3 --zero_sequence_parallel 4"),
        ("FSDP", PARALLELISM.format(cp=1, sp=2), "--bf16 True --zero_stage 3 --zero_sequence_parallel 2"),
        ("FSDP", DEEPSPEED_SECTION, "--bf16 True --zero_stage 3"),  # a section that accelerate does not read
    ],
)
def test_a_file_of_accelerate_becomes_flags(kind, section, flags, tmp_path, capsys):
    output = _of_yaml(ACCELERATE_FILE.format(kind=kind) + section, tmp_path, capsys)
    assert output.splitlines()[-2:] == ["in place of --config_file of accelerate launch:", f"  {flags}"]
    assert "no counterpart" not in output
    assert "--num_processes of hf-zero" in output
    RunConfig.parse("classify", output.splitlines()[-1].split())


def test_the_deepspeed_file_that_a_file_of_accelerate_names_is_read_with_it(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    section = f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'ds.json'}\n  zero3_init_flag: false\n"
    output = _of_yaml(ACCELERATE_FILE.format(kind="DEEPSPEED") + section, tmp_path, capsys)
    assert output.splitlines()[-1].strip() == "--max_grad_norm 0 --zero_stage 1 --bf16 True"


def test_what_accelerate_has_and_is_not_here_is_named():
    config = {"distributed_type": "MEGATRON_LM", "mixed_precision": "fp8", "colour": "blue"}
    config["fsdp_config"] = {"fsdp_version": 1}
    result = migrated(config)
    assert result.missing.keys() == {"distributed_type", "mixed_precision", "colour"}
    assert result.missing["colour"] == "not among the keys of accelerate 1.15 that are known here"
    assert result.always["fsdp_config"] == "distributed_type is MEGATRON_LM, so it is not used"
    hybrid = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    assert "--zero_shard_size auto" in migrated(hybrid).missing["fsdp_config.fsdp_sharding_strategy"]
