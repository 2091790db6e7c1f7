"""A run that another trainer began goes on under `ZeroTrainer`, in the middle of an epoch."""

import os

import pytest
import torch

from hf_zero.errors import CheckpointError
from tests import models
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import PLAIN, assert_close, train


# 24 rows in batches of four: step 3 lies in the middle of the epoch.
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def build(name: str):
    """A Llama: "tied", or "lora" for its adapters."""
    if name == "tied":
        return models.build("llama-tied")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(models.build("llama"), config)


@pytest.mark.full("more cases", after=3)
@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "stage, num_ranks, settings, name",
    [
        (1, 1, {}, "tied"),
        (3, 1, {}, "tied"),
        (3, 2, {}, "lora"),
        (1, 2, {}, "tied"),
        (3, 2, {"optim": "sgd"}, "tied"),
        (2, 2, {"optim": "adagrad"}, "tied"),
    ],
)
@ranks("num_ranks", timeout=240)
def test_a_run_of_trainer_goes_on(tmp_path, stage, num_ranks, settings, name):
    settings = {**SAVING, **settings}
    whole = train(PLAIN, tmp_path, "llama-tied", model=build(name), **settings)
    torch.distributed.barrier()
    resume = f"{tmp_path}/checkpoint-3"
    resumed = train(stage, f"{tmp_path}/zero", "llama-tied", model=build(name), resume=resume, **settings)
    assert len(resumed.losses) == len(whole.losses) == 6
    assert_close(resumed, whole, f"begun by Trainer, resumed at stage {stage}")


@ranks(2, timeout=240)
def test_a_schedule_that_was_not_saved_goes_on_at_the_step(tmp_path):
    whole = train(PLAIN, tmp_path, **SAVING)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        os.unlink(f"{tmp_path}/checkpoint-3/scheduler.pt")
    torch.distributed.barrier()
    resumed = train(3, f"{tmp_path}/zero", resume=f"{tmp_path}/checkpoint-3", **SAVING)
    assert resumed.rates == pytest.approx(whole.rates)
    assert_close(resumed, whole, "resumed without scheduler.pt")


def _another_program(folder):
    for given in (True, f"{folder}/checkpoint-3"):
        with pytest.raises(CheckpointError, match=f"; convert it with hf-zero convert {folder}/checkpoint-3 NEW"):
            train(3, folder, resume=given, **SAVING)


@pytest.mark.parametrize("name", ["latest", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp.bin", ".metadata"])
def test_a_checkpoint_of_another_program_is_refused_by_the_command_that_converts_it(tmp_path, name):
    """An older one of ours is not taken in its place."""
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    path = tmp_path / "checkpoint-3" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("global_step3")
    (tmp_path / "checkpoint-3" / "global_step3").mkdir()
    run_ranks(_another_program, 2, str(tmp_path), timeout=240)
