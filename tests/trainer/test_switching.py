"""A run that another trainer began goes on under `ZeroTrainer`, in the middle of an epoch."""

import os

import numpy as np
import pytest
import torch

from hf_zero.errors import CheckpointError
from tests.distributed import run_ranks
from tests.trainer.harness import PLAIN, assert_close, train


# 24 rows in batches of four: step 3 lies in the middle of the epoch.
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def _goes_on(folder, stage, settings):
    settings = {**SAVING, **settings}
    whole = train(PLAIN, folder, "llama-tied", **settings)
    torch.distributed.barrier()
    resumed = train(stage, f"{folder}/zero", "llama-tied", resume=f"{folder}/checkpoint-3", **settings)
    assert len(resumed.losses) == len(whole.losses) == 6
    assert_close(resumed, whole, f"begun by Trainer, resumed at stage {stage}")


@pytest.mark.parametrize(
    "stage, num_ranks, settings",
    [(1, 1, {}), (3, 1, {}), (1, 2, {}), (3, 2, {}), (3, 2, {"optim": "sgd"}), (2, 2, {"optim": "adagrad"})],
)
def test_a_run_of_trainer_goes_on(tmp_path, stage, num_ranks, settings):
    run_ranks(_goes_on, num_ranks, str(tmp_path), stage, settings, timeout=240)


def _saves_plainly(folder):
    run = train(PLAIN, folder, "llama-tied", per_device_train_batch_size=4, **SAVING)
    return {name: weight.numpy() for name, weight in run.weights.items()}


def _goes_on_elsewhere(folder, resume):
    run = train(3, folder, "llama-tied", resume=resume, **SAVING)
    return {name: weight.numpy() for name, weight in run.weights.items()}


def test_a_run_of_trainer_on_one_rank_goes_on_on_two(tmp_path):
    whole = run_ranks(_saves_plainly, 1, str(tmp_path / "one"), timeout=240)[0]
    resume = str(tmp_path / "one" / "checkpoint-3")
    for name, weight in run_ranks(_goes_on_elsewhere, 2, str(tmp_path / "two"), resume, timeout=240)[0].items():
        assert np.allclose(weight, whole[name], rtol=1e-5, atol=1e-6), name


def _without_scheduler(folder):
    whole = train(PLAIN, folder, **SAVING)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        os.unlink(f"{folder}/checkpoint-3/scheduler.pt")
    torch.distributed.barrier()
    resumed = train(3, f"{folder}/zero", resume=f"{folder}/checkpoint-3", **SAVING)
    assert resumed.rates == pytest.approx(whole.rates)
    assert_close(resumed, whole, "resumed without scheduler.pt")


def test_a_schedule_that_was_not_saved_goes_on_at_the_step(tmp_path):
    run_ranks(_without_scheduler, 2, str(tmp_path), timeout=240)


def _another_optimizer(folder):
    train(PLAIN, folder, optim="sgd", **SAVING)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="by an optimizer without betas"):
        train(3, f"{folder}/zero", resume=f"{folder}/checkpoint-3", **SAVING)


def test_a_run_of_another_optimizer_is_refused(tmp_path):
    run_ranks(_another_optimizer, 2, str(tmp_path), timeout=240)
