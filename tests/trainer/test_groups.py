"""Shard groups under Trainer, TRL and accelerate: what they train over groups of two is what they train over all."""

import pytest
import torch

from tests import models
from tests.accelerator import example
from tests.distributed import ranks, run_ranks
from tests.trainer import harness
from tests.trl import harness as trl_harness


pytest.importorskip("peft")


def _adapted() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = {"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(models.build("llama"), LoraConfig(**settings))


def _under_trainer(folder: str) -> None:
    settings = {"data": harness.Rows("llama"), "save_strategy": "steps", "save_steps": 2}
    full = harness.train(3, f"{folder}/full", model=_adapted(), **settings)
    harness.assert_learned(full)
    for size in ("2", "auto"):
        found = harness.train(3, f"{folder}/{size}", model=_adapted(), zero_shard_size=size, **settings)
        harness.assert_close(found, full, f"LoRA, groups of {size}")
    resumed = harness.train(3, f"{folder}/2", model=_adapted(), resume=f"{folder}/2/checkpoint-2", **settings)
    harness.assert_close(resumed, full, "saved in groups of 2 and resumed over all ranks")
    settings["zero_shard_size"] = "2"
    resumed = harness.train(3, f"{folder}/full", model=_adapted(), resume=f"{folder}/full/checkpoint-2", **settings)
    harness.assert_close(resumed, full, "saved over all ranks and resumed in groups of 2")


def _under_trl(folder: str) -> None:
    trl_harness.save_models(folder) if torch.distributed.get_rank() == 0 else None
    torch.distributed.barrier()
    rows = trl_harness.data("preference")
    runs = [
        trl_harness.train(3, "DPO", folder, trl_harness.policy(folder), rows, zero_shard_size=size)
        for size in (None, "2")
    ]
    harness.assert_learned(runs[0], 3)
    harness.assert_close(runs[1], runs[0], "DPO in groups of two", rtol=1e-4)


@pytest.mark.full("slow")
@pytest.mark.parametrize("act", [_under_trainer, _under_trl])
def test_trainers_train_in_groups_as_over_all_ranks(tmp_path, act):
    run_ranks(act, 4, str(tmp_path), timeout=240)


@pytest.mark.full("slow")
@ranks(4, timeout=240)
def test_a_script_for_accelerate_trains_in_groups_as_over_all_ranks():
    wanted, _, _ = example.train(example.with_zero(3))
    for stage in (1, 3):
        found, _, _ = example.train(example.with_zero(stage, zero_shard_size=2))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
