"""Several models prepared by one accelerator: optimizers and clipping find theirs by the parameters."""

import pytest
import torch
import torch.distributed as dist

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.config import ZeroConfig
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from tests import models, training
from tests.distributed import ranks
from tests.trainer.harness import reset_accelerate, weights_of


NAMES = ("mlp", "llama")


def _alone(stage):
    """Each model by itself."""
    found = {}
    for name in NAMES:
        subject = training.Sharded(models.build(name), training.adamw, stage)
        found[name] = training.train(subject, name, num_steps=3)
    return found


def _together(stage):
    from accelerate import Accelerator

    reset_accelerate()
    accelerator = ZeroAccelerator.adopt(
        Accelerator(cpu=True), ZeroConfig(stage=stage), torch.device("cpu"), trains=lambda model: model is not judge
    )
    judge = models.build("llama", seed=3)
    built = {name: models.build(name) for name in NAMES}
    optimizers = {name: training.adamw(model) for name, model in built.items()}
    with pytest.raises(ConfigError, match="the parameters belong to no prepared model"):
        accelerator.prepare_optimizer(optimizers["mlp"])
    for model in built.values():
        accelerator.prepare_model(model)
    accelerator.prepare_model(judge, evaluation_mode=True)
    optimizers = {name: accelerator.prepare_optimizer(optimizer) for name, optimizer in optimizers.items()}
    norms = {name: [] for name in NAMES}
    for step in range(3):
        for name, model in built.items():
            batch = models.batch(name, seed=1000 * step + dist.get_rank())
            accelerator.backward(training.loss_of(model(**batch)))
            norms[name].append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizers[name].step()
            optimizers[name].zero_grad()
    assert not engine_of(judge).gradients
    return {name: (torch.stack(norms[name]), weights_of(built[name])) for name in NAMES}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("Several models, each with its optimizer, in one accelerator", area="Models in one process")
@ranks(2)
def test_each_optimizer_trains_its_own_model(stage):
    alone, together = _alone(stage), _together(stage)
    for name in NAMES:
        norms, weights = together[name]
        assert torch.equal(norms, alone[name].norms)
        assert all(torch.equal(weight, weights[key]) for key, weight in alone[name].weights.items())
