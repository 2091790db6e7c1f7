"""Tensor-parallel models in a trainer: the numbers are those of plain `Trainer` over the data-parallel ranks alone."""

import numpy as np
import pytest
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from tests import models
from tests.activation.parallel import loaded, saved, whole
from tests.distributed import run_ranks
from tests.trainer.harness import PLAIN, Rows, assert_close, make, record, seed_everything


SETTINGS = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "max_steps": 3}


def _plain(folder: str, pretrained: str, flags: dict):
    seed_everything()
    trainer = make(PLAIN, folder, loaded(pretrained), Rows("llama"), **SETTINGS, **flags)
    trainer.train()
    return record(trainer), _predicted(trainer)


def _predicted(trainer) -> np.ndarray:
    """Of so many rows that the last batch is not whole."""
    return trainer.predict(Rows("llama", 7, seed=9)).predictions


def _divided(folder: str, pretrained: str, stage: int, flags: dict):
    seed_everything()
    trainer = make(stage, folder, loaded(pretrained, 2), Rows("llama"), **SETTINGS, **flags)
    trainer.train()
    assert engine_of(trainer.model).comm.num_ranks == dist.get_world_size() // 2
    with hf_zero.gathered(trainer.model):
        weights = {name: whole(p).float().cpu() for name, p in trainer.model.named_parameters()}
    run = record(trainer)
    run.weights = weights
    return run, _predicted(trainer)


@pytest.mark.support("Tensor parallelism in ZeroTrainer", area="ZeRO-R")
@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("stage, order", [(1, "random"), (2, "batch_rebalance"), (3, "random")])
def test_a_tensor_parallel_model_trains_as_the_whole_one_under_ddp(tmp_path, stage, order):
    pretrained, flags = saved("llama", tmp_path), {"train_sampling_strategy": order}
    plain = run_ranks(_plain, 2, str(tmp_path / "plain"), pretrained, flags, timeout=240)
    flags = {"zero_partition_activations": True, "zero_offload_activations": True, **flags}
    own = run_ranks(_divided, 4, str(tmp_path / "own"), pretrained, stage, flags, timeout=240)
    for rank, (run, predicted) in enumerate(own):
        wanted, whole_rows = plain[rank // 2]
        assert_close(run, wanted, f"stage {stage}, rank {rank}")
        assert predicted.shape == whole_rows.shape and np.allclose(predicted, whole_rows, rtol=1e-4, atol=1e-5)


def _refused(folder: str, pretrained: str) -> None:
    with pytest.raises(
        ConfigError, match="save_strategy: checkpoints of tensor-parallel models .* save_strategy='no'"
    ):
        make(3, folder, loaded(pretrained, 2), Rows("llama"), **{**SETTINGS, "save_strategy": "steps"})
    with pytest.raises(ConfigError, match="is tensor-parallel, which is not supported with zero_sequence_parallel"):
        make(3, folder, loaded(pretrained, 2), Rows("llama"), **SETTINGS, zero_sequence_parallel=2)
    objects = {"eval_use_gather_object": True, "eval_do_concat_batches": False}
    with pytest.raises(ConfigError, match="is tensor-parallel, which is not supported with eval_use_gather_object"):
        make(3, folder, loaded(pretrained, 2), Rows("llama"), **SETTINGS, **objects)
    with pytest.raises(ConfigError, match="zero_partition_activations: .*; use zero_offload_activations, or load"):
        make(3, folder, models.build("llama"), Rows("llama"), **SETTINGS, zero_partition_activations=True)


@pytest.mark.support("Tensor parallelism: checkpoints in ZeroTrainer", area="ZeRO-R", refused=True, stages=(1, 2, 3))
def test_what_does_not_go_with_a_tensor_parallel_model_is_refused(tmp_path):
    run_ranks(_refused, 2, str(tmp_path / "out"), saved("llama", tmp_path), timeout=240)
