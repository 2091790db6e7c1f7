"""From `shard` to `unshard`: what is refused in one line, one process that behaves as one of several, and at the end a
plain model again."""

import copy
import gc
import os
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, LifecycleError
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.engine.models import Tower, one_loss
from tests.engine.reference import SETTINGS, build_seeded, sgd, sharded
from tests.tiers import more
from tests.training import Sharded, adamw, loss_of, train


@ranks(2)
def test_a_group_without_this_rank_is_refused():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=2, group=group, **SETTINGS)
        one_loss(model, 0, 0).backward()
    else:
        with pytest.raises(ConfigError, match="^group: rank 1 is not a member"):
            hf_zero.shard(build_seeded(Tower), stage=2, group=group, **SETTINGS)


@ranks(2)
def test_a_world_size_that_is_not_that_of_the_group_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(ConfigError, match="^WORLD_SIZE is 3 but the process group has 2 ranks; .*torchrun"):
            hf_zero.shard(build_seeded(Tower), stage=2, **SETTINGS)


@ranks(2)
def test_the_grad_scaler_of_torch_is_refused_with_the_one_that_works():
    for stage in (0, 3):
        model, _, optimizer = sharded(Tower, stage)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(one_loss(model, dist.get_rank(), 0)).backward()
        for act in (scaler.unscale_, scaler.step):
            with pytest.raises(LifecycleError, match="^GradScaler: .* use hf_zero.ZeroGradScaler"):
                act(optimizer)
        scaler = hf_zero.ZeroGradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(one_loss(model, dist.get_rank(), 0)).backward()
        scaler.step(optimizer)
        scaler.update()
    plain = build_seeded(Tower)
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(plain.parameters())
    scaler.scale(one_loss(plain, 0, 0)).backward()
    scaler.step(optimizer)


def test_sharding_in_inference_mode_is_refused():
    with (
        torch.inference_mode(),
        pytest.raises(LifecycleError, match=r"^shard: was called inside torch.inference_mode"),
    ):
        hf_zero.shard(Tower(), stage=2)


# One process as one of several: what only sharded parameters show needs no launcher.


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(1)
def test_a_strict_process_computes_the_same_bits(dtype):
    settings = {"compute_dtype": dtype} if dtype else {}
    wanted = train(Sharded(models.build("llama-tied"), adamw, 0, **settings), "llama-tied")
    for stage in (1, 2, 3):
        subject = Sharded(models.build("llama-tied"), adamw, stage, strict=True, **settings)
        assert subject.engine.root.is_sharded == (stage == 3)
        assert_equal(train(subject, "llama-tied"), wanted, f"strict stage {stage} and one process")


def test_strict_is_what_the_environment_says(monkeypatch):
    assert not ZeroConfig().strict
    monkeypatch.setenv("HF_ZERO_STRICT", "1")
    assert ZeroConfig().strict and not ZeroConfig(strict=False).strict
    monkeypatch.setenv("HF_ZERO_STRICT", "0")
    assert not ZeroConfig().strict
    monkeypatch.setenv("HF_ZERO_STRICT", "yes")
    with pytest.raises(ConfigError, match="HF_ZERO_STRICT"):
        ZeroConfig()


def test_a_read_outside_of_a_forward_is_refused_in_one_strict_process():
    model = torch.nn.Linear(4, 4)
    hf_zero.shard(model, stage=3, strict=True)
    with pytest.raises(LifecycleError, match="^weight: is used"):
        model.weight.isnan()
    with hf_zero.gathered(model):
        assert not model.weight.isnan().any()


# What was sharded is a plain model again.


fast = partial(adamw, lr=1e-2)


def _attributes(model) -> set[tuple[str, type, str]]:
    return {(key, type(part), name) for key, part in model.named_modules() for name in part.__dict__}


@pytest.mark.quick(cases=1)
@pytest.mark.support("`unshard()`, then using, copying and sharding the model again", area="Models in one process")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name, dtype", [("mixtral", None), ("llama-tied", torch.bfloat16)])
@pytest.mark.full("more cases", after=3)
@ranks(2)
def test_an_unsharded_model_is_a_plain_one(stage, name, dtype):
    model = models.build(name)
    batch = models.batch(name, seed=dist.get_rank())
    with torch.no_grad():
        model(**batch)  # transformers notes on a model that it was used
    untouched = _attributes(model)
    identities = {key: id(p) for key, p in model.named_parameters(remove_duplicate=False)}
    subject = Sharded(model, fast, stage, compute_dtype=dtype)
    engine, optimizer = subject.engine, subject.optimizer
    trained = train(subject, name)
    masters = {}
    for shard in engine.named_shards(resident=stage == 0):
        masters.setdefault(shard.name, []).append((shard.start, shard.tensor.clone()))
    assert hf_zero.ShardedModel(engine).unshard() is model
    # nothing of ours is left on it
    assert _attributes(model) == untouched, _attributes(model) ^ untouched
    assert {key: id(p) for key, p in model.named_parameters(remove_duplicate=False)} == identities
    assert engine_of(model) is None
    for key, p in model.named_parameters():
        assert p.dtype is torch.float32 and p.untyped_storage().nbytes() == p.numel() * 4, key
        for start, values in masters.get(key, ()):
            assert torch.equal(p.detach().reshape(-1)[start : start + values.numel()], values), key
        if dtype is None:
            assert torch.equal(p, trained.weights[key]), key
    with pytest.raises(LifecycleError, match="was unsharded"):
        optimizer.step()
    # it is used, copied, and sharded again like any other
    twin = copy.deepcopy(model)
    assert torch.equal(loss_of(model(**batch)), loss_of(twin(**batch)))
    loss_of(model(**batch)).backward()
    optimizer.zero_grad()  # has no gradients left, and leaves those of the plain model as they are
    assert any(p.grad is not None for p in model.parameters())
    model.zero_grad()
    first, second = (train(Sharded(each, fast, stage), name) for each in (model, twin))
    assert_equal(first, second, f"stage {stage}")


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_compiled_blocks_are_plain_ones_again_and_buffers_are_given_up(stage):
    model = models.build("llama")
    batch = models.batch("llama", seed=dist.get_rank())
    wanted = loss_of(model(**batch))
    attributes = _attributes(model)
    engine = engine_of(hf_zero.shard(model, stage=stage))
    hf_zero.compile_blocks(engine, backend="eager")
    with pytest.raises(LifecycleError, match="already compiled with .*'eager'"):
        hf_zero.compile_blocks(engine, backend="aot_eager")
    torch.testing.assert_close(loss_of(model(**batch)), wanted, rtol=1e-6, atol=0.0)
    slots = [weakref.ref(unit.slot.buffer) for unit in engine.units if unit.slot is not None]
    hf_zero.ShardedModel(engine).unshard()
    assert _attributes(model) == attributes
    assert all(slot() is None for slot in slots), "who keeps the engine keeps no buffers"
    assert torch.equal(loss_of(model(**batch)), wanted)


@pytest.mark.parametrize(
    "stage, settings", [(0, {}), (2, {"offload": "optimizer"}), (3, {"shared_memory": False}), *more((2, {}), (3, {}))]
)
@ranks(2)
def test_a_sharded_model_that_nobody_holds_is_freed(stage, settings):
    def num_open() -> int:
        while gc.collect():
            pass
        return len(os.listdir("/proc/self/fd"))

    def train_and_drop() -> list[weakref.ref]:
        subject = Sharded(models.build("llama"), adamw, stage, **settings)
        train(subject, "llama", num_steps=2)
        return [weakref.ref(each) for each in (subject.model, subject.engine, subject.engine.comm, subject.optimizer)]

    train_and_drop()
    before = num_open()
    dropped = train_and_drop()
    assert num_open() <= before
    assert [each() for each in dropped] == [None] * len(dropped)


@ranks(2)
def test_unshard_is_refused_inside_gathered_and_what_comes_out_after_it_can_be_pickled():
    model = models.build("mlp")
    engine = hf_zero.shard(model, stage=3)
    with hf_zero.gathered(model):
        with pytest.raises(LifecycleError, match="unshard inside hf_zero.gathered"):
            hf_zero.ShardedModel(engine).unshard()
    twin = pickle.loads(pickle.dumps(hf_zero.ShardedModel(engine).unshard()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def _unread(folder: str) -> None:
    from transformers import LlamaForCausalLM

    plain = models.build("llama")
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    model = hf_zero.load_pretrained(LlamaForCausalLM, folder)
    hf_zero.shard(model, stage=3).unshard()
    for (name, p), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, wanted), name


def test_a_model_that_was_read_when_it_was_sharded_is_whole_afterwards(tmp_path):
    run_ranks(_unread, 2, str(tmp_path))


@pytest.mark.quick
def test_the_handle_of_a_model_that_was_unsharded_says_so():
    sharded = hf_zero.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), stage=2)
    sharded.unshard()
    calls = [sharded.unshard, sharded.named_shards, lambda: sharded.full_grad("0.weight")]
    for call in (*calls, lambda: sharded.computing_in(torch.bfloat16)):
        with pytest.raises(LifecycleError, match="the model was unsharded; shard it again"):
            call()
