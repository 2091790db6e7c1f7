"""What users of Trainer do, and expect of any trainer."""

import logging
import os

import pytest
import torch

import hf_zero
from hf_zero.errors import CheckpointError
from tests import models
from tests.distributed import run_ranks
from tests.trainer.harness import Rows, make, reset_accelerate, train


SAVING = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}


def _default_arguments(folder) -> None:
    os.chdir(folder)
    reset_accelerate()
    trainer = hf_zero.ZeroTrainer(models.build("bert"))
    assert type(trainer.args) is hf_zero.ZeroTrainingArguments
    assert trainer.args.output_dir == "tmp_trainer", "as under Trainer"
    reset_accelerate()
    trainer = hf_zero.ZeroSeq2SeqTrainer(models.build("t5"))
    assert type(trainer.args) is hf_zero.ZeroSeq2SeqTrainingArguments


def test_arguments_can_be_left_out(tmp_path):
    run_ranks(_default_arguments, 1, str(tmp_path))


def _finds_a_batch_size(folder, stage) -> None:
    model = models.build("bert")
    limit, tried = 5, []

    def run_out(module, args, kwargs):
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model.register_forward_pre_hook(run_out, with_kwargs=True)
    trainer = make(
        stage, folder, model, Rows("bert"), auto_find_batch_size=True, per_device_train_batch_size=8, max_steps=3
    )
    trainer.train()
    assert tried == [8, 7, 6, 5, 5, 5]
    assert trainer.state.global_step == 3 and trainer.zero_engine is not None


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_finds_its_batch_size(tmp_path, stage):
    run_ranks(_finds_a_batch_size, 1, str(tmp_path), stage)


def _missing(folder) -> None:
    """As a ValueError, which is what people catch around Trainer; and as ours."""
    for resume in (True, f"{folder}/nowhere", folder):
        for kind in (ValueError, CheckpointError):
            with pytest.raises(kind):
                train(3, folder, resume=resume)


def test_a_missing_checkpoint_is_the_error_that_trainer_raises(tmp_path):
    run_ranks(_missing, 1, str(tmp_path))


def _resumes_with_other_settings(folder) -> tuple[list[str], ...]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    train(3, folder, **{**SAVING, "max_steps": 4})
    try:
        train(3, folder, resume=f"{folder}/checkpoint-4", **{**SAVING, "max_steps": 10})
        changed, told[:] = list(told), []
        train(3, folder, resume=f"{folder}/checkpoint-6", **{**SAVING, "max_steps": 10})
        same, told[:] = list(told), []
        train(3, folder, resume=f"{folder}/checkpoint-6", **{**SAVING, "max_steps": 10, "learning_rate": 5e-3})
        faster, told[:] = list(told), []
        train(3, folder, resume=f"{folder}/checkpoint-6", **{**SAVING, "max_steps": 10, "warmup_steps": 8})
        other = list(told)
    finally:
        logging.getLogger("hf_zero").removeHandler(handler)
    return changed, same, faster, other


def test_a_schedule_that_is_not_as_it_was_is_told_before_training(tmp_path):
    first, second = run_ranks(_resumes_with_other_settings, 2, str(tmp_path), timeout=240)
    changed, same, faster, other = first
    assert any(
        "step 4: the learning rate goes from 0 to 0.0006, since its schedule is now made for 10 steps and was for 4; "
        "to keep the old one, resume with --max_steps 4" in line
        for line in changed
    ), changed
    assert not any("learning rate" in line for line in same), same
    assert any("the learning rate of the checkpoint goes on (0.001), not the given one (0.005)" in x for x in faster)
    assert any(
        "step 6: the learning rate goes from 0.0004 to 0.00075, since its schedule has other" in x for x in other
    )
    assert not any("learning rate" in line for lines in second for line in lines), "rank 0 speaks"
