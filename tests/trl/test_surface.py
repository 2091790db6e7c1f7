"""`hf_zero.trl` as a user meets it: its names, its flags, and what it refuses before anything is loaded."""

import os
import pickle
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import hf_zero
import hf_zero.trl
from hf_zero import lazy_names
from hf_zero.errors import CheckpointError, ConfigError
from tests.distributed import ranks
from tests.trl import harness


pytest.importorskip("trl")


def test_trl_is_imported_by_those_who_use_it_alone():
    """As is the trainer room, which `hf_zero.trl` needs."""
    code = """
import sys, hf_zero
assert {"ZeroSFTTrainer", "ZeroGRPOConfig"} <= set(dir(hf_zero.trl)) & set(hf_zero.trl.__all__)
assert not {"trl", "hf_zero.trainer"} & sys.modules.keys()
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "trl":
            raise ModuleNotFoundError("No module named 'trl'", name="trl")
sys.meta_path.insert(0, Missing())
try:
    hf_zero.trl.ZeroSFTTrainer
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    (line,) = found.stdout.strip().splitlines()
    assert line.startswith("hf_zero.trl.ZeroSFTTrainer: requires TRL 1.16 or newer") and "pip install -U" in line


def test_another_trl_is_named(monkeypatch):
    def import_module(_):
        raise ImportError("cannot import name 'KTOTrainer' from 'trl'", name="trl")

    monkeypatch.delitem(hf_zero.trl.__dict__, "ZeroKTOTrainer", raising=False)
    monkeypatch.setattr(lazy_names, "import_module", import_module)
    found = f"found {metadata.version('trl')} (cannot import name 'KTOTrainer' from 'trl')"
    with pytest.raises(ImportError, match=re.escape(f"{found}; pip install -U 'trl>=1.16'")):
        hf_zero.trl.ZeroKTOTrainer  # noqa: B018


@pytest.mark.quick
def test_every_name_is_a_class_that_can_be_pickled_and_derived_from():
    import trl

    for name in hf_zero.trl.__all__:
        found = getattr(hf_zero.trl, name)
        assert pickle.loads(pickle.dumps(found)) is found is getattr(hf_zero.trl, name)
        stock = getattr(trl, name.removeprefix("Zero"), None)
        assert stock is None or issubclass(found, stock)
    assert not hasattr(hf_zero.trl, "ZeroMindTrainer")


def test_arguments_may_be_given_in_the_order_of_the_trainer():
    """A reference model, or reward functions, come before the arguments in TRL, and not in `Trainer`."""
    names = {"DPO": "ref_model", "GRPO": "reward_funcs", "SFT": None}
    for name, second in names.items():
        order = [word for word in ("model", second, "args") if word]
        with pytest.raises(ConfigError, match=f"args: str is not a Zero{name}Config"):
            getattr(hf_zero.trl, f"Zero{name}Trainer")(*order)
    with pytest.raises(TypeError, match="ZeroSFTTrainer takes at most 15 arguments, but 16 were given"):
        hf_zero.trl.ZeroSFTTrainer(*range(16))


@pytest.mark.full("slow")
@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"])
def test_configs_are_parsed_from_the_command_line(name, tmp_path):
    from transformers import HfArgumentParser
    from trl import TrlParser

    config = getattr(hf_zero.trl, f"Zero{name}Config")
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--zero_stage", "2", "--zero_bucket_mb", "3"]
    for parser in (HfArgumentParser, TrlParser):
        (args,) = parser(config).parse_args_into_dataclasses(flags)
        assert type(args) is config and (args.zero_stage, args.zero_bucket_mb) == (2, "3")
        assert args.bf16 and args.zero_config().compute_dtype is torch.bfloat16, "TRL's default"
    (args,) = HfArgumentParser(config).parse_args_into_dataclasses([*flags, "--bf16", "false"])
    assert args.zero_config().compute_dtype is None


@ranks(1, timeout=240)
def test_arguments_can_be_left_out(tmp_path):
    os.chdir(tmp_path)
    harness.save_models(tmp_path)
    harness.reset_accelerate()
    parts = {"train_dataset": harness.data("text", 4), "processing_class": harness.tokenizer()}
    made = [hf_zero.trl.ZeroSFTTrainer(name, **parts).args for name in (tmp_path / "policy", f"{tmp_path}/policy")]
    made.append(hf_zero.trl.ZeroSFTTrainer(harness.policy(tmp_path), **parts).args)
    for args in made:
        assert type(args) is hf_zero.trl.ZeroSFTConfig and args.output_dir == "policy-SFT"


@pytest.mark.support("TRL: generation with continuous batching", area="Trainers", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2, timeout=240)
def test_continuous_batching_is_refused(tmp_path, stage):
    for name in ("GRPO", "RLOO"):
        for flag in ("use_transformers_continuous_batching", "use_transformers_paged"):
            with pytest.raises(ConfigError, match=f"{flag}: generates in a separate thread.*remove it"):
                harness.make(stage, name, tmp_path, f"{tmp_path}/nowhere", None, **{flag: True})


@pytest.mark.support("TRL: generation by vLLM in the same processes", area="Trainers", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2, timeout=240)
def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path, stage):
    train = harness.data("text", 4)

    def sft(model, **settings):
        return harness.make(stage, "SFT", tmp_path, model, train, **settings)

    with pytest.raises(
        ConfigError, match="args: ZeroTrainingArguments is not a ZeroSFTConfig; use hf_zero.trl.ZeroSFTConfig"
    ):
        args = hf_zero.ZeroTrainingArguments(output_dir=tmp_path)
        hf_zero.trl.ZeroSFTTrainer("nowhere", args, train_dataset=train)
    with pytest.raises(CheckpointError, match="/nowhere: does not exist; pass the folder of a saved model"):
        sft(f"{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="model_init_kwargs: device_map='auto' places parameters"):
        sft(f"{tmp_path}/policy", model_init_kwargs={"device_map": "auto"})
    for name in ("GRPO", "RLOO", "Distillation"):
        with pytest.raises(ConfigError, match="vllm_mode colocate: every process would hold a full.*remove"):
            harness.make(stage, name, tmp_path, f"{tmp_path}/nowhere", None, use_vllm=True, vllm_mode="colocate")
        with pytest.raises(ConfigError, match=r"use_vllm: vLLM is not installed; pip install 'trl\[vllm\]'"):
            harness.make(stage, name, tmp_path, f"{tmp_path}/nowhere", None, use_vllm=True, vllm_mode="server")
