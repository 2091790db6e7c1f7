"""A sharded model seen in another dtype for an evaluation; moved and cast for good it cannot be."""

import copy

import pytest
import torch

import hf_zero
from hf_zero.errors import ConfigError, LifecycleError
from tests.distributed import ranks
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import ALL_STAGES, SETTINGS, assert_away, build_seeded, sharded, weights_of


pytestmark = [pytest.mark.direct, pytest.mark.quick]


class Normed(Tower):
    """A tower with running statistics: a floating-point buffer and a count."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(self.norm(x))


@ranks(2)
def test_a_model_seen_in_bf16_computes_what_a_cast_one_does_and_keeps_its_masters():
    plain = build_seeded(Normed).eval()
    x = inputs(0, 0).bfloat16()
    with torch.no_grad():
        wanted = plain.to(torch.bfloat16)(x)
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Normed, stage)
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=0.1)
        before = weights_of(model)
        with hf_zero.ShardedModel(engine).computing_in(torch.bfloat16):
            assert torch.equal(model.eval()(x), wanted), f"stage {stage}"
            model.to(torch.bfloat16)  # it is that already
            with pytest.raises(LifecycleError, match="cannot be moved or cast"):
                model.float()
            with pytest.raises(LifecycleError, match="write outside"):
                with hf_zero.gathered(model.head.bias, writeback=True):
                    pass
            for inside in (
                hf_zero.ShardedModel(engine).computing_in(torch.float16).__enter__,
                hf_zero.ShardedModel(engine).unshard,
                optimizer.step,
            ):
                with pytest.raises(LifecycleError, match="leave|exit"):
                    inside()
        assert_away(model, engine)
        after = weights_of(model)
        assert all(torch.equal(after[name], before[name]) for name in before), f"stage {stage}"
        assert model.norm.running_mean.dtype is torch.float32
        loss_of(model.train()(inputs(0, 0))).backward()
        optimizer.step()


@pytest.mark.support("Resizing a sharded model", area="Models in one process", stages=ALL_STAGES, refused=True)
@ranks(2)
def test_resizing_the_embeddings_of_a_sharded_model_is_refused():
    from tests import models

    for stage in ALL_STAGES:
        model = models.build("llama-tied")
        engine = hf_zero.shard(model, stage=stage, **SETTINGS)
        assert model.resize_token_embeddings(models.VOCAB) is model.get_input_embeddings()
        with pytest.raises(LifecycleError, match="sharded with 61 rows; .*ShardedModel.*unshard"):
            model.resize_token_embeddings(models.VOCAB + 3)
        hf_zero.ShardedModel(engine).unshard().resize_token_embeddings(models.VOCAB + 3)
        assert model.lm_head.weight.shape[0] == models.VOCAB + 3


@pytest.mark.support("Casting a sharded model", area="Models in one process", stages=ALL_STAGES, refused=True)
@ranks(2)
def test_moving_or_casting_a_sharded_model_is_refused_and_changes_nothing():
    for stage in ALL_STAGES:
        model, _, _ = sharded(Tower, stage)
        wanted = weights_of(model)
        moves = (
            (model, {"dtype": torch.bfloat16}),
            (model.layers[0], {"dtype": torch.float16}),
            (model.head, {"device": "meta"}),
            (torch.nn.ModuleList([model]), {"dtype": torch.float64}),
        )
        for module, where in moves:
            with pytest.raises(LifecycleError, match="ShardedModel.*unshard"):
                module.to(**where)
        found = weights_of(model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), f"stage {stage}"


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bf16", torch.int8, None])
def test_what_is_no_floating_dtype_is_refused(dtype):
    sharded = hf_zero.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), stage=2)
    with pytest.raises(ConfigError, match="computing_in: .* is not a floating dtype"):
        sharded.computing_in(dtype).__enter__()
    if dtype is not None:
        with pytest.raises(ConfigError, match="compute_dtype: .* is not a floating dtype"):
            hf_zero.shard(torch.nn.Linear(2, 2), stage=2, compute_dtype=dtype)


def test_what_is_read_in_another_dtype_was_not_written(caplog):
    """Reading the whole values inside, and again after it, is no write that stage 3 would drop."""
    sharded = hf_zero.shard(build_seeded(Normed), stage=3, strict=True)
    with sharded.computing_in(torch.bfloat16), hf_zero.gathered(sharded.model):
        assert sharded.model.head.bias.dtype is torch.bfloat16
    with hf_zero.gathered(sharded.model):
        pass
    assert "was written inside" not in caplog.text


def test_an_activation_that_several_models_hold_is_left_alone():
    """Some of transformers' hold one that is there once in a process, such as `gelu_pytorch_tanh`."""
    shared = torch.nn.GELU()
    first, second = (torch.nn.Sequential(torch.nn.Linear(4, 4), shared) for _ in range(2))
    before = {name: copy.copy(value) for name, value in vars(shared).items()}
    hf_zero.shard(first, stage=3)
    assert vars(shared) == before
    copy.deepcopy(second).to(torch.bfloat16)
