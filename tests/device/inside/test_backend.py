"""A device type that is no part of torch, with a module that has no streams, events or `mem_get_info`."""

import pytest
import torch

import hf_zero
from hf_zero.engine.memory import memory_of_device
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import make_inner, tiny_llama, train_sharded
from tests.gpu.late import assert_same


TOY = torch.device("toy", 0)


def test_its_memory_is_known():
    values = torch.empty(2**20, device=TOY)
    assert memory_of_device(TOY) == 2**31
    del values


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_on_the_cpu_is_sharded_to_it(stage):
    trained = []
    for device in (TOY, torch.device("cpu")):
        model = tiny_llama().to(device)
        params = list(model.parameters())
        hf_zero.shard(model, device=TOY, stage=stage, strict=True)
        assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
        optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
        trained.append(train_sharded(model, optimizer, 0, TOY, range(2), clips=True))
    assert_same(trained[1:], trained[:1], "from the CPU")
