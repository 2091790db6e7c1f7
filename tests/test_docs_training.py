"""The Python in docs/training.md runs, and trains as the same loop does under DDP."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.distributed import run_ranks
from tests.test_readme import fenced_blocks
from tests.trainer.harness import Rows, reset_accelerate, seed_everything


PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BLOCKS = [block.text for block in fenced_blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"]


def _names(data, folder) -> dict:
    return {
        "Accelerator": Accelerator,
        "DataLoader": DataLoader,
        "ZeroAccelerator": hf_zero.ZeroAccelerator,
        "copy": copy,
        "data": data,
        "folder": f"{folder}/checkpoint",
        "model": models.build("llama"),
        "torch": torch,
    }


def _loops(folder, stage):
    data, example = Rows("llama", 16), BLOCKS[1]
    reset_accelerate()
    seed_everything()
    wanted = _names(data, folder)
    plain = example.replace("ZeroAccelerator(zero_stage=3", "Accelerator(cpu=True").replace(
        "accelerator.save_state", ""
    )
    exec(plain, wanted)
    assert type(wanted["model"]).__name__ == "DistributedDataParallel"
    reset_accelerate()
    seed_everything()
    found = _names(data, folder)
    exec(example.replace("zero_stage=3", f"zero_stage={stage}"), found)
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found["norm"], wanted["norm"], rtol=1e-5, atol=0.0)
    found["sharded"] = hf_zero.ShardedModel(found["model"])
    exec(BLOCKS[2], found)
    for (name, p), q in zip(found["twin"].named_parameters(), wanted["model"].parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-6 + 1e-5 * q.abs().max(), name


@pytest.mark.quick
def test_every_block_has_a_test():
    assert len(BLOCKS) == 6, "each block belongs to a test here"


@pytest.mark.quick
def test_one_process_shows_what_sharded_parameters_show():
    exec(BLOCKS[5], {"hf_zero": hf_zero, "model": models.build("llama")})


def _reduces_as_it_goes():
    model = models.build("llama")
    sharded = hf_zero.shard(model, stage=1)
    optimizer = hf_zero.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(2):
        loss = model(**models.batch("llama", seed=step)).loss
        exec(BLOCKS[0], {"sharded": sharded, "loss": loss})
        reduced = [gradient.is_reduced for gradient in engine_of(model).gradients]
        assert all(reduced) is (step > 0), "the first backward shows whether there are others within"
        optimizer.step()


def test_the_last_backward_reduces_while_it_runs():
    run_ranks(_reduces_as_it_goes, 2)


def _trl_and_muon(folder):
    from tests.trl import harness

    if torch.distributed.get_rank() == 0:
        harness.save_models(folder)
    torch.distributed.barrier()
    reset_accelerate()
    names = {
        "data": harness.data("text"),
        "folder": f"{folder}/policy",
        "hf_zero": hf_zero,
        "tokenizer": harness.tokenizer(),
    }
    exec(BLOCKS[3].replace('"out"', f'"{folder}/out"'), names)
    assert names["trainer"].state.global_step == 2 and engine_of(names["trainer"].model).stage == 3

    model = models.build("llama")
    names.update(model=model, sharded=hf_zero.shard(model, stage=3))
    exec(BLOCKS[4], names)
    before = {shard.name: shard.tensor.clone() for shard in names["sharded"].named_shards()}
    model(**models.batch("llama", seed=0)).loss.backward()
    names["optimizer"].step()
    assert all((shard.tensor != before[shard.name]).any() for shard in names["sharded"].named_shards())


def test_the_examples_with_trl_and_muon_train(tmp_path):
    run_ranks(_trl_and_muon, 2, str(tmp_path), timeout=240)


@pytest.mark.support("Accelerate without Trainer", area="Trainers")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loop_with_accelerate_trains_as_it_does_under_ddp(tmp_path, stage):
    run_ranks(_loops, 2, str(tmp_path), stage, timeout=240)
    hf_zero.checkpoint.check_checkpoint(tmp_path / "checkpoint")
