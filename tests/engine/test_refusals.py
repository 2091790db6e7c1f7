"""Misuse that is refused in one line, which would otherwise end in an error of torch's internals."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import ConfigError, LifecycleError
from tests.distributed import ranks
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import SETTINGS, build_seeded, sgd, sharded


@ranks(2)
def test_a_group_without_this_rank_is_refused():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=2, group=group, **SETTINGS)
        loss_of(model(inputs(0, 0))).backward()
    else:
        with pytest.raises(ConfigError, match="^group: rank 1 is not a member"):
            hf_zero.shard(build_seeded(Tower), stage=2, group=group, **SETTINGS)


@ranks(2)
def test_the_grad_scaler_of_torch_is_refused_with_the_one_that_works():
    for stage in (0, 3):
        model, _, optimizer = sharded(Tower, stage)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model(inputs(dist.get_rank(), 0)))).backward()
        for act in (scaler.unscale_, scaler.step):
            with pytest.raises(LifecycleError, match="^GradScaler: .* use hf_zero.ZeroGradScaler"):
                act(optimizer)
        scaler = hf_zero.ZeroGradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(loss_of(model(inputs(dist.get_rank(), 0)))).backward()
        scaler.step(optimizer)
        scaler.update()
    plain = build_seeded(Tower)
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(plain.parameters())
    scaler.scale(loss_of(plain(inputs(0, 0)))).backward()
    scaler.step(optimizer)


def test_sharding_in_inference_mode_is_refused():
    with (
        torch.inference_mode(),
        pytest.raises(LifecycleError, match=r"^shard: was called inside torch.inference_mode"),
    ):
        hf_zero.shard(Tower(), stage=2)
