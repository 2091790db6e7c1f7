"""A run that another trainer began goes on under `ZeroTrainer`, in the middle of an epoch."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hf_zero.errors import CheckpointError
from tests.distributed import free_port, ranks, run_ranks
from tests.trainer import deepspeed_trainer
from tests.trainer.deepspeed_trainer import SAVING, build
from tests.trainer.harness import PLAIN, assert_close, train


def _goes_on(folder, stage, settings, name):
    settings = {**SAVING, **settings}
    whole = train(PLAIN, folder, "llama-tied", model=build(name), **settings)
    torch.distributed.barrier()
    resume = f"{folder}/checkpoint-3"
    resumed = train(stage, f"{folder}/zero", "llama-tied", model=build(name), resume=resume, **settings)
    assert len(resumed.losses) == len(whole.losses) == 6
    assert_close(resumed, whole, f"begun by Trainer, resumed at stage {stage}")


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
def test_a_run_of_trainer_goes_on(tmp_path, stage, num_ranks, settings, name):
    if name == "lora":
        pytest.importorskip("peft")
    run_ranks(_goes_on, num_ranks, str(tmp_path), stage, settings, name, timeout=240)


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


def _recipes(*command):
    """Runs a tool in a process of its own, which knows nothing of the ranks."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "hf_zero.recipes", *command]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


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


def _goes_on_from_deepspeed(folder, stage, name):
    whole = train(PLAIN, f"{folder}/plain", "llama-tied", model=build(name), **SAVING)
    resume = f"{folder}/checkpoint-3"
    with pytest.raises(CheckpointError, match=f"is a checkpoint of DeepSpeed ZeRO; .*hf-zero convert {resume} NEW"):
        train(stage, f"{folder}/zero", "llama-tied", model=build(name), resume=resume, **SAVING)
    if torch.distributed.get_rank() == 0:
        base = build(name).config
        base.architectures = ["LlamaForCausalLM"]
        base.save_pretrained(f"{folder}/base")
        _recipes("convert", resume, f"{folder}/new/checkpoint-3", "--model", f"{folder}/base")
    torch.distributed.barrier()
    resume = f"{folder}/new/checkpoint-3"
    resumed = train(stage, f"{folder}/zero", "llama-tied", model=build(name), resume=resume, **SAVING)
    assert len(resumed.losses) == len(whole.losses) == 6
    assert_close(resumed, whole, f"begun under DeepSpeed, resumed at stage {stage}")


@pytest.mark.full("more cases", after=1)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("from_stage, stage, name", [(1, 3, "tied"), (2, 1, "lora"), (3, 3, "tied"), (3, 3, "lora")])
def test_a_run_of_trainer_under_deepspeed_goes_on(tmp_path, from_stage, stage, name):
    if name == "lora":
        pytest.importorskip("peft")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += [deepspeed_trainer.__file__, str(from_stage), name, str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    run_ranks(_goes_on_from_deepspeed, 2, str(tmp_path), stage, name, timeout=240)
