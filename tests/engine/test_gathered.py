"""`hf_zero.gathered`, the way to whole parameters at every stage, at any time; `computing_in`, another dtype; and what
docs build on both."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.away import AwayParameter
from hf_zero.errors import ConfigError, LifecycleError
from tests import models
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import Tower, inputs, loss_of, one_backward, one_loss
from tests.engine.reference import (
    ALL_STAGES,
    SETTINGS,
    assert_away,
    assert_equal_weights,
    assert_like_plain_torch,
    assert_same_traffic,
    build_seeded,
    sgd,
    sharded,
    train_reference,
)


@ranks(2)
def test_modules_and_parameters_are_whole_inside():
    wanted = {name: p.detach().clone() for name, p in build_seeded(Tower).named_parameters()}
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        sharded = hf_zero.shard(model, stage=stage, **SETTINGS)
        engine, weight = engine_of(sharded), model.layers[1].up.weight
        for what in (model, weight, [weight], model.layers, model.layers[1], model.parameters(), iter([weight])):
            with hf_zero.gathered(what):
                assert torch.equal(weight, wanted["layers.1.up.weight"]), f"stage {stage}"
            assert_away(model, engine)
        with sharded.gathered(writeback=True):
            assert torch.equal(weight, wanted["layers.1.up.weight"]), f"stage {stage}"
            weight.data.zero_()
        with sharded.gathered():
            assert not weight.any()
        with hf_zero.gathered([]):
            pass
        with hf_zero.gathered(torch.nn.Linear(2, 2)):  # a module that is not sharded
            pass


@pytest.mark.quick
@ranks(3)
@torch.no_grad()
def test_writeback_takes_rank_0s_values_everywhere():
    """Rank 0's values become everyone's, whatever the others wrote, and training goes on from them."""
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        before = weights_of(model)
        written, assigned = chosen = [model.layers[1].up.weight, model.head.bias]
        with hf_zero.gathered(chosen, writeback=True):
            written.fill_(3.0 + dist.get_rank())
            assigned.data = torch.full_like(assigned, 3.0 + dist.get_rank())  # as PEFT merges some adapters
        assert_away(model, engine)
        after = weights_of(model)
        for name, value in after.items():
            wanted = torch.full_like(value, 3.0) if name in ("layers.1.up.weight", "head.bias") else before[name]
            assert torch.equal(value, wanted), f"stage {stage}: {name}"


def masters_of(engine) -> dict[tuple[str, int], torch.Tensor]:
    return {(s.name, s.start): s.tensor.clone() for s in engine.named_shards()}


@ranks(2)
@torch.no_grad()
def test_writeback_updates_the_masters_of_what_was_written():
    """What is written in bf16 reaches the fp32 masters; what is not keeps their 16 lower bits."""
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=torch.bfloat16, **SETTINGS))
        before = masters_of(engine)
        assert all(tensor.dtype is torch.float32 for tensor in before.values())
        with hf_zero.gathered(model.layers[1].up.weight, writeback=True):
            assert model.layers[1].up.weight.dtype is torch.bfloat16
            model.layers[1].up.weight.fill_(0.75)
        for (name, start), tensor in masters_of(engine).items():
            if name == "layers.1.up.weight":
                assert bool((tensor == 0.75).all()), f"stage {stage}: {name} from {start}"
            else:
                assert torch.equal(tensor, before[name, start]), f"stage {stage}: {name} lost its lower bits"


@ranks(2)
@torch.no_grad()
def test_contexts_may_be_nested():
    wanted = {name: p.detach().clone() for name, p in build_seeded(Tower).named_parameters()}
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        first, second = model.layers[0].up.weight, model.layers[1].up.weight
        with hf_zero.gathered(first):
            with hf_zero.gathered([first, second], writeback=True):
                second.add_(1)
            assert torch.equal(first, wanted["layers.0.up.weight"]), f"stage {stage}"
            if stage == 3:
                assert isinstance(second, AwayParameter)
            with hf_zero.gathered(model):
                assert torch.equal(second, wanted["layers.1.up.weight"] + 1), f"stage {stage}"
        assert_away(model, engine)
        assert torch.equal(weights_of(model)["layers.1.up.weight"], wanted["layers.1.up.weight"] + 1)


def between(model, rank, step):
    loss = one_loss(model, rank, step)
    with hf_zero.gathered(model):
        norm = sum(p.detach().square().sum() for p in model.parameters())
    return [loss, norm]


def inside(model, rank, step):
    with hf_zero.gathered(model):
        return one_backward(model, rank, step)


def forward_inside(model, rank, step):
    with hf_zero.gathered(model):
        return one_loss(model, rank, step)


def backward_inside(model, rank, step):
    loss = one_loss(model, rank, step)
    with hf_zero.gathered(model):
        loss.backward()
    return loss.detach()


def part_inside(model, rank, step):
    with hf_zero.gathered([model.layers[1].up.weight, model.head.bias]):
        return one_backward(model, rank, step)


def evaluation_inside(model, rank, step):
    with torch.no_grad(), hf_zero.gathered(model):
        other = loss_of(model(inputs(rank, step, salt=1)))
    return [other, one_loss(model, rank, step)]


def in_a_hook(register: str, model, rank, step):
    """A hook on one block reads other blocks: the one before, still in a slot, and the next, on its way."""
    norms = []

    def read(*_):
        for module in (*model.layers, model.head):
            with hf_zero.gathered(module):
                norms.append(sum(p.detach().norm() for p in module.parameters()))

    handle = getattr(model.layers[1].up, register)(read)
    losses = one_backward(model, rank, step)
    handle.remove()
    return losses + norms


def penalty_on_parameters(model, rank, step):
    """A regularisation term computed from the parameters themselves, inside the context."""
    with hf_zero.gathered(model):
        loss = one_loss(model, rank, step) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
    return loss.detach()


@pytest.mark.full("more cases", after=4)
@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "act",
    [
        between,
        inside,
        partial(in_a_hook, "register_forward_hook"),
        partial(in_a_hook, "register_full_backward_hook"),
        forward_inside,
        backward_inside,
        part_inside,
        evaluation_inside,
        penalty_on_parameters,
    ],
)
@ranks(2)
def test_training_around_and_inside_the_context(act):
    assert_like_plain_torch(Tower, act)


@ranks(2)
def test_an_exception_leaves_the_context_in_order():
    for stage in ALL_STAGES:
        model, engine, _ = sharded(Tower, stage)
        wanted = weights_of(model)
        with pytest.raises(ZeroDivisionError), hf_zero.gathered(model):
            raise ZeroDivisionError
        assert_away(model, engine)
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}", exact=True)


@ranks(2)
def test_a_step_inside_the_context_is_refused_and_changes_nothing():
    """The refusal comes before the masters have moved: the same step outside is the first."""
    _, wanted = train_reference(Tower, num_steps=1)
    for stage in (1, 2, 3):
        model, engine, optimizer = sharded(Tower, stage)
        with hf_zero.gathered(model):
            one_backward(model, dist.get_rank(), 0)
            with pytest.raises(hf_zero.errors.LifecycleError, match="gathered"):
                optimizer.step()
        optimizer.step()
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}")
        assert_same_traffic(engine)


# The model seen in another dtype for an evaluation; moved and cast for good it cannot be.


class Normed(Tower):
    """A tower with running statistics: a floating-point buffer and a count."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.direct
@pytest.mark.quick
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
        assert_equal_weights(weights_of(model), before, f"stage {stage}", exact=True)
        assert model.norm.running_mean.dtype is torch.float32
        loss_of(model.train()(inputs(0, 0))).backward()
        optimizer.step()


@pytest.mark.direct
@pytest.mark.quick
@pytest.mark.support("Resizing a sharded model", area="Models in one process", stages=ALL_STAGES, refused=True)
@ranks(2)
def test_resizing_the_embeddings_of_a_sharded_model_is_refused():
    for stage in ALL_STAGES:
        model = models.build("llama-tied")
        engine = hf_zero.shard(model, stage=stage, **SETTINGS)
        assert model.resize_token_embeddings(models.VOCAB) is model.get_input_embeddings()
        with pytest.raises(LifecycleError, match="sharded with 61 rows; .*ShardedModel.*unshard"):
            model.resize_token_embeddings(models.VOCAB + 3)
        hf_zero.ShardedModel(engine).unshard().resize_token_embeddings(models.VOCAB + 3)
        assert model.lm_head.weight.shape[0] == models.VOCAB + 3


@pytest.mark.direct
@pytest.mark.quick
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
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}", exact=True)


@pytest.mark.direct
@pytest.mark.parametrize("dtype", ["bf16", torch.int8, None])
@pytest.mark.quick
def test_what_is_no_floating_dtype_is_refused(dtype):
    sharded = hf_zero.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), stage=2)
    with pytest.raises(ConfigError, match="computing_in: .* is not a floating dtype"):
        sharded.computing_in(dtype).__enter__()
    if dtype is not None:
        with pytest.raises(ConfigError, match="compute_dtype: .* is not a floating dtype"):
            hf_zero.shard(torch.nn.Linear(2, 2), stage=2, compute_dtype=dtype)


@pytest.mark.direct
@pytest.mark.quick
def test_what_is_read_in_another_dtype_was_not_written(caplog):
    """Reading the whole values inside, and again after it, is no write that stage 3 would drop."""
    sharded = hf_zero.shard(build_seeded(Normed), stage=3, strict=True)
    with sharded.computing_in(torch.bfloat16), hf_zero.gathered(sharded.model):
        assert sharded.model.head.bias.dtype is torch.bfloat16
    with hf_zero.gathered(sharded.model):
        pass
    assert "was written inside" not in caplog.text


@pytest.mark.direct
@pytest.mark.quick
def test_an_activation_that_several_models_hold_is_left_alone():
    """Some of transformers' hold one that is there once in a process, such as `gelu_pytorch_tanh`."""
    shared = torch.nn.GELU()
    first, second = (torch.nn.Sequential(torch.nn.Linear(4, 4), shared) for _ in range(2))
    before = {name: copy.copy(value) for name, value in vars(shared).items()}
    hf_zero.shard(first, stage=3)
    assert vars(shared) == before
    copy.deepcopy(second).to(torch.bfloat16)


# The moving average of weights in recipes/weight_average.py, which scripts copy


def weight_average(model, decay=0.8):
    source = (Path(__file__).parents[2] / "recipes" / "weight_average.py").read_text(encoding="utf-8")
    exec(source, found := {})
    return found["WeightAverage"](model, decay)


@pytest.mark.support("EMA of the weights, {precision}", area="Training features")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_the_average_of_the_documentation_is_exact_and_sends_nothing(stage, precision):
    model = build_seeded(Tower)
    model.layers[0].norm.weight.requires_grad_(False)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    dtype = torch.bfloat16 if precision == "bf16" else None
    engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=dtype, **SETTINGS))
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(p for p in model.parameters() if p.requires_grad))
    average = weight_average(model)
    for step in range(3):
        loss_of(model(inputs(dist.get_rank(), step).to(dtype or torch.float32))).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = dict(engine.comm.counters.sent_nbytes)
        average.update()
        assert dict(engine.comm.counters.sent_nbytes) == sent
        for name, value in weights_of(model).items():
            wanted[name].lerp_(value.float(), 1 - 0.8)
    before = {(each.name, each.start): each.tensor.clone() for each in engine.named_shards()}
    with average.applied():
        found = weights_of(model)
    after = {(each.name, each.start): each.tensor for each in engine.named_shards()}
    assert all(torch.equal(after[key], before[key]) for key in before)
    # the whole weights are rounded to the 8 bits of bf16, before and after they are averaged
    bound = {"rtol": 2**-7, "atol": 1e-3} if dtype else {"rtol": 1e-6, "atol": 1e-7}
    for name, value in found.items():
        torch.testing.assert_close(value.float(), wanted[name], **bound)
