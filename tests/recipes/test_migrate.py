"""`migrate`: every key of a DeepSpeed configuration becomes a flag that exists, or is named with the reason."""

import json
from dataclasses import fields

import pytest
from transformers.trainer_utils import SchedulerType

from hf_zero.recipes.cli import EXIT_BAD_CONFIG, main
from hf_zero.recipes.deepspeed_keys import OPTIMIZERS, RULES, SCHEDULERS
from hf_zero.recipes.deepspeed_rules import Flag
from hf_zero.recipes.migrate import UNKNOWN, migrated, rendered
from hf_zero.recipes.settings import parse_settings
from hf_zero.trainer import ZeroTrainingArguments
from hf_zero.trainer.arguments import SUPPORTED_OPTIMS


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
    assert result.auto.keys() == {
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
    assert "zero_hpz_partition_size: no second copy per host" in output
    training = parse_settings("classify", output.splitlines()[-1].split()).training
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
    assert command == "--zero_stage 0 --report_to tensorboard wandb comet_ml"
    assert parse_settings("classify", command.split()).training["report_to"] == ["tensorboard", "wandb", "comet_ml"]


@pytest.mark.parametrize(
    "beside", [{}, {"gradient_accumulation_steps": 2}, {"train_micro_batch_size_per_gpu": "auto"}]
)
def test_a_batch_size_of_all_ranks_is_to_be_set_where_its_factors_are_not(beside):
    assert (
        "64: set --per_device_train_batch_size x processes x"
        in migrated({"train_batch_size": 64, **beside}).missing["train_batch_size"]
    )
    whole = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert migrated(whole).missing == {}


def test_every_key_is_accounted_for():
    result = migrated(STAGE_3)
    leaves = {path for path in _paths(STAGE_3) if path not in RULES or not path.startswith("aio.")}
    named = {*result.sources.values(), *result.auto, *result.always, *result.missing}
    named |= {"aio.block_size", "aio.queue_depth"}  # named as one section
    hidden = {"zero_optimization.offload_optimizer.device"}  # the parameters' offload goes further
    assert leaves - named == hidden


def _paths(section: dict, prefix: str = "") -> set[str]:
    deeper = [_paths(value, f"{prefix}{key}.") for key, value in section.items() if isinstance(value, dict)]
    return {f"{prefix}{key}" for key, value in section.items() if not isinstance(value, dict)}.union(*deeper)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({}, {"zero_stage": "0"}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero_stage": "2", "zero_offload": "optimizer"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"fp16": "True", "zero_autocast": "True"}),
        ({"communication_data_type": "bfp16"}, {"zero_reduce_dtype": "bf16"}),
        ({"wandb": {"enabled": True, "project": "x"}}, {"report_to": "wandb"}),
        ({"wandb": {"enabled": False}}, {}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/nvme"}}}, {}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5}}},
            {"zero_offload": "optimizer", "zero_offload_dir": "/n", "zero_offload_fraction": "0.5"},
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1}}},
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
        ),
    ],
)
def test_a_setting_becomes_its_flags(config, flags):
    result = migrated(config)
    assert result.flags == {"zero_stage": "0"} | flags
    assert result.missing == {}


@pytest.mark.parametrize(
    ("config", "path", "reason"),
    [
        ({"colour": "blue"}, "colour", UNKNOWN),
        ({"zero_optimization": {"stage4": {"a": 1}}}, "zero_optimization.stage4.a", UNKNOWN),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", '"OneBitAdam": not among the optimizers'),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            "decoupled",
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.params.betas", "not a value that"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type", "not among the schedules"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale", "128: the loss scale is always dynamic"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp32 or bf16"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights", "ZeRO"),
        ({"amp": {"enabled": True}}, "amp", "Apex"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(config, path, reason):
    result = migrated(config)
    assert result.missing.keys() == {path}
    assert reason in result.missing[path]
    assert f"  {path}: " in rendered(result).split("no counterpart:")[1]


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "hysteresis": 2}},
        {"prescale_gradients": False},
        {"gradient_predivide_factor": 1.0},
        {"amp": {"enabled": False}},
        {"scheduler": {"params": {"warmup_min_lr": "auto"}}},
    ],
)
def test_what_was_off_is_not_missed(config):
    assert migrated(config).missing == {}


def test_every_flag_of_the_table_exists():
    known = {field.name for field in fields(ZeroTrainingArguments)}
    named = {name for rule in RULES.values() if isinstance(rule, Flag) for name in rule.flags}
    assert named <= known
    assert set(OPTIMIZERS.values()) <= SUPPORTED_OPTIMS
    assert set(SCHEDULERS.values()) <= {kind.value for kind in SchedulerType}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "ds.json: cannot be read (No such file"),
        ("{", "ds.json: not valid JSON (Expecting"),
        ("[1]", "ds.json: a list at the top, expected the keys of a DeepSpeed config"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    assert main(["migrate", "ds.json"]) == EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert error.startswith(f"hf_zero.recipes: {message}")
    assert error.count("\n") == 1
