"""The moving average of weights in recipes/weight_average.py, which scripts copy."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from tests.distributed import ranks
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import SETTINGS, build_seeded, sgd, weights_of


DECAY = 0.8
NUM_STEPS = 3


def weight_average(model, decay=DECAY):
    source = (Path(__file__).parents[2] / "recipes" / "weight_average.py").read_text(encoding="utf-8")
    exec(source, found := {})
    return found["WeightAverage"](model, decay)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(2)
def test_the_average_of_the_documentation_is_exact_and_sends_nothing(stage, dtype):
    model = build_seeded(Tower)
    model.layers[0].norm.weight.requires_grad_(False)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=dtype, **SETTINGS))
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(p for p in model.parameters() if p.requires_grad))
    average = weight_average(model)
    for step in range(NUM_STEPS):
        loss_of(model(inputs(dist.get_rank(), step).to(dtype or torch.float32))).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = dict(engine.comm.counters.sent_nbytes)
        average.update()
        assert dict(engine.comm.counters.sent_nbytes) == sent
        if dtype is None:
            for name, value in weights_of(model).items():
                wanted[name].lerp_(value, 1 - DECAY)
    before = {(each.name, each.start): each.tensor.clone() for each in engine.named_shards()}
    with average.applied():
        found = weights_of(model)
    after = {(each.name, each.start): each.tensor for each in engine.named_shards()}
    assert all(torch.equal(after[key], before[key]) for key in before)
    for name, value in found.items() if dtype is None else ():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)
