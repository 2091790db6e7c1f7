"""Transforms of `torch.func`, and `torch.compile` of the whole model: exact, or refused with the way to do it."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

import hf_zero
from hf_zero.errors import LifecycleError
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import build_seeded


def per_sample_gradients(model) -> dict[str, torch.Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of_one(params, row):
        return functional_call(model, params, (row[None],)).square().sum()

    return vmap(grad(loss_of_one), in_dims=(None, 0))(params, inputs(0, 0))


def input_derivative(model) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs(0, 0)
    return jvp(model, (given,), (torch.ones_like(given),))


@pytest.mark.parametrize("stage", [2, 3])
def test_transforms_inside_gathered_are_exact(stage):
    wanted, derivative = per_sample_gradients(build_seeded(Tower)), input_derivative(build_seeded(Tower))
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=stage, strict=True)
    with hf_zero.gathered(model):
        found = per_sample_gradients(model)
        assert all(map(torch.equal, input_derivative(model), derivative))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    loss_of(model(inputs(0, 0))).backward()  # as ever


@pytest.mark.parametrize("transform", [input_derivative, lambda model: vmap(model)(inputs(0, 0)[:, None])])
def test_a_transform_that_would_have_to_gather_is_refused(transform):
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, strict=True)
    with pytest.raises(LifecycleError, match=r"a transform of torch.func .* inside `with hf_zero.gathered\(model\):`"):
        transform(model)
    loss_of(model(inputs(0, 0))).backward()


def test_a_model_that_is_compiled_whole_at_stage_3_names_the_way():
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, strict=True)
    with pytest.raises(RuntimeError, match=r"torch.compile\(model\) reads .* hf_zero.compile_blocks\(model\)"):
        torch.compile(model, backend="eager")(inputs(0, 0))
