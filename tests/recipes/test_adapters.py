"""Adapters of every kind that the keys describe, trained by `sft` on two ranks and loaded by PEFT."""

import json

import pytest

from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import logged, trained


pytest.importorskip("peft")

SETTINGS = {"learning_rate": 1e-2, "max_length": 48, "max_steps": 4, "per_device_train_batch_size": 4}


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        pytest.param({"use_dora": True, "use_rslora": True}, {"use_dora": True, "use_rslora": True}, id="dora"),
        pytest.param({"lora_modules_to_save": "lm_head"}, {"modules_to_save": ["lm_head"]}, id="modules-to-save"),
        pytest.param({"load_in_4bit": True}, {}, id="4-bits"),
        pytest.param(
            {"load_in_4bit": True, "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "float32"},
            {},
            id="4-bits-nested",
            marks=pytest.mark.full("more cases"),
        ),
        pytest.param({"load_in_8bit": True}, {}, id="8-bits", marks=pytest.mark.full("more cases")),
    ],
)
def test_an_adapter_learns_and_peft_loads_it(tiny_llama, tmp_path, settings, told):
    from peft import AutoPeftModelForCausalLM

    if any("bit" in name for name in settings):
        pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(32)]
    settings = {**SETTINGS, "train_file": write_rows(tmp_path / "rows.jsonl", rows), **settings}
    trained("sft", tmp_path, model_name_or_path=tiny_llama, use_peft=True, lora_r=4, zero_stage=3, **settings)
    losses = logged(tmp_path / "out", "loss")
    assert losses[-1] < losses[0]
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert told.items() <= described.items()
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert any(bool(param.any()) for name, param in model.named_parameters() if "lora_B" in name)


def test_parameters_by_name_get_an_adapter(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    from hf_zero.recipes.lora import TrainedArguments, adapt

    model = adapt(
        AutoModelForCausalLM.from_pretrained(tiny_llama),
        TrainedArguments(use_peft=True, lora_dropout=0.0, lora_target_parameters=["mlp.up_proj.weight"]),
    )
    found = {name for name, param in model.named_parameters() if param.requires_grad}
    assert found and all("mlp.up_proj" in name for name in found)


# What the recipes add to TRL's keys: of the run, and of the rows.
ADDED = {
    *("task", "num_processes", "resume", "dry_run", "overwrite_output_dir"),
    *("train_file", "test_file", "max_train_rows", "max_test_rows", "skip_bad_rows", "dataset_shuffle_buffer"),
    *("samples", "freeze", "unfreeze", "preprocess", "datasets", "dataset_mixing", "dataset_stopping_strategy"),
}
REWARDED = {"reward_funcs", "reward_model_name_or_path"}  # of TRL's scripts for them
NEW = ("config_name", "config_overrides", "tokenizer_name")  # of transformers' run_clm.py
ADDED_BY_TASK = {
    **{"sft": {"dataset_format", "compute_metrics"}, "pretrain": {"compute_metrics", *NEW}, "reward": set()},
    **dict.fromkeys(("dpo", "kto", "distill"), {"chat_template_path"}),
    **dict.fromkeys(("grpo", "rloo"), REWARDED | {"chat_template_path"}),
}
# What they leave out: the task decides what the model does, and DDP is not what trains it.
LEFT_OUT = {"lora_task_type", "ignore_bias_buffers"}


@pytest.mark.parametrize("task", ADDED_BY_TASK)
def test_the_keys_are_those_of_trl_and_few_others(task):
    from dataclasses import fields

    trl = pytest.importorskip("trl")
    from hf_zero.recipes.run_config import make_parser
    from hf_zero.trainer import ZeroArgumentsMixin

    kinds = make_parser(task).kinds
    config = next(base for base in kinds[-1].__mro__ if base.__module__.startswith("trl."))
    ours, theirs, zero = (
        {each.name for kind in group for each in fields(kind)}
        for group in (kinds, (trl.ScriptArguments, trl.ModelConfig, config), (ZeroArgumentsMixin,))
    )
    assert theirs - ours == LEFT_OUT
    assert ours - theirs - zero == (ADDED | ADDED_BY_TASK[task]) - theirs


def test_modules_to_adapt_may_be_named_by_a_regular_expression():
    from hf_zero.recipes.lora import TrainedArguments, lora_config

    expression = ".*(q_proj|v_proj)"
    assert lora_config(TrainedArguments(use_peft=True, lora_target_modules=[expression])).target_modules == expression
    assert lora_config(TrainedArguments(use_peft=True, lora_target_modules=["q_proj"])).target_modules == {"q_proj"}
