"""What blocks that are not checkpointed save, in the host's memory: the same bits, each storage moved once."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activation import saved_tensors
from hf_zero.config import ZeroConfig
from hf_zero.engine import engine_of
from hf_zero.errors import LifecycleError, UnsupportedError
from hf_zero.planner import refuse_impossible
from tests import models
from tests.activation.subjects import NOISE_NBYTES, checkpointed, held_between, rank_batch, store_of
from tests.distributed import run_ranks
from tests.training import Sharded, adamw, assert_equal, loss_of, train, train_accumulating


offloaded = pytest.mark.support("Activations: offload without gradient checkpointing", area="ZeRO-R")
WIDTH = 16


@pytest.fixture(autouse=True)
def _moves_all(monkeypatch):
    monkeypatch.setattr(saved_tensors, "MIN_NBYTES", 1)


def _same_bits(stage: int, name: str, dtype: torch.dtype | None, settings: dict) -> None:
    saved_tensors.MIN_NBYTES, before = 1, saved_tensors.MIN_NBYTES  # ranks are processes that other tests use too
    try:
        for trains in (train, train_accumulating) if name == "llama" and stage == 3 else (train,):
            records = []
            for away in (False, True):
                model = models.build(name)
                trained = Sharded(model, adamw, stage, compute_dtype=dtype, offload_activations=away, **settings)
                records.append(trains(trained, name, num_steps=2))
            assert_equal(*records, f"{name}, stage {stage}")
            sent = trained.engine.comm.counters.sent_nbytes
            assert "offload" in settings or sent["down"] == sent["up"] > 0
            gc.collect()
            assert (store_of(trained.engine).arena.used_nbytes, store_of(trained.engine).device_nbytes) == (0, 0)
    finally:
        saved_tensors.MIN_NBYTES = before


@offloaded
@pytest.mark.full("slow")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_weights_are_those_without_offload(stage):
    run_ranks(_same_bits, 2, stage, "llama", None, {})


@pytest.mark.full("more cases")
@pytest.mark.parametrize(
    "name, dtype, settings",
    [
        ("gpt2", None, {}),
        ("t5", None, {}),
        ("albert", None, {}),
        ("mixtral", None, {}),
        ("llama", torch.bfloat16, {"tiled_mlp": 3}),
        ("llama", None, {"offload": "params"}),
    ],
)
def test_offload_in_blocks_of_several_kinds(name, dtype, settings):
    run_ranks(_same_bits, 2, 3, name, dtype, settings)


def _saved_nbytes(model: nn.Module, batch: dict) -> list[int]:
    """Bytes that each block of a plain model alone keeps for its backward: each storage once, without parameters,
    buffers and what it is given without gradients."""
    found: list[dict[int, int]] = []
    handles = []

    def before(module, args, kwargs):
        tensors = [*module.parameters(), *module.buffers(), *saved_tensors.tensors_in(args, kwargs)]
        staying = {t.untyped_storage()._cdata for t in tensors if isinstance(t, nn.Parameter) or not t.requires_grad}
        own: dict[int, int] = {}
        found.append(own)

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in staying:
                own[storage._cdata] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        hooks.__enter__()
        handles.append(module.register_forward_hook(partial(_leave, hooks)))

    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
    loss = loss_of(model(**batch))
    for handle in handles:
        handle.remove()
    del loss
    return [sum(own.values()) for own in found]


def _leave(hooks, *_) -> None:
    hooks.__exit__(None, None, None)


def _leaves_the_device() -> None:
    """What stays is what the last block keeps, which the backward needs at once."""
    saved_tensors.MIN_NBYTES, before = 1, saved_tensors.MIN_NBYTES
    try:
        batch = rank_batch("llama", 0)
        own = _saved_nbytes(models.build("llama"), batch)
        held = []
        for away in (False, True):
            trained = Sharded(models.build("llama"), adamw, 3, strict=True, offload_activations=away)
            held.append(held_between(trained.model, batch))
        moved = sum(own[:-1])
        assert abs(held[0] - held[1] - moved) <= NOISE_NBYTES < moved, (held, own)
        loss = loss_of(trained(**batch))
        store = store_of(trained.engine)
        assert (moved, own[-1]) == pytest.approx((store.arena.used_nbytes, store.device_nbytes), rel=0.01)
        loss.backward()
        del loss
        assert (store.arena.used_nbytes, store.device_nbytes) == (0, 0)
    finally:
        saved_tensors.MIN_NBYTES = before


@pytest.mark.quick
def test_what_all_blocks_but_the_last_keep_leaves_the_device_once():
    run_ranks(_leaves_the_device, 1)


def test_small_storages_stay(monkeypatch):
    monkeypatch.setattr(saved_tensors, "MIN_NBYTES", 2**20)
    sharded = hf_zero.shard(model := models.build("llama"), stage=3, strict=True, offload_activations=True)
    loss_of(model(**models.batch("llama", seed=0))).backward()
    assert engine_of(sharded.model).comm.counters.sent_nbytes.get("down", 0) == 0


class Writing(nn.Module):
    """A block that writes to what it has computed with."""

    def __init__(self, writes: bool):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.writes = writes

    def forward(self, hidden):
        inner = self.first(hidden).relu_()  # writes before it saves: that is right
        out = self.second(inner)
        if self.writes:
            inner.add_(1)
        return out


def test_what_is_written_to_after_it_was_saved_is_refused_as_without_offload():
    for writes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Writing(writes) for _ in range(3)))
        hf_zero.shard(model, stage=3, strict=True, offload_activations=True)
        loss = model(torch.randn(4, WIDTH)).sum()
        if not writes:
            loss.backward()
            continue
        with pytest.raises(LifecycleError, match="a saved tensor was modified by an inplace operation"):
            loss.backward()


def _write(tensors: list, *_) -> None:
    tensors.pop().add_(1)


@pytest.mark.parametrize("index", [0, -1])  # the last block's input stays on the device
def test_an_input_of_a_checkpointed_block_that_is_written_to_is_refused(index):
    model = checkpointed(models.build("llama"))
    hf_zero.shard(model, stage=2, offload_activations=True)
    given = []
    model.model.layers[index].register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    model.model.norm.register_forward_pre_hook(partial(_write, given))
    for _ in range(2):  # which block is the last is known from the second pass on
        with pytest.raises(LifecycleError, match="a saved tensor was modified by an inplace operation"):
            loss_of(model(**models.batch("llama", seed=0))).backward()


def test_the_same_storage_written_in_between_is_two_values():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    engine = engine_of(hf_zero.shard(model, stage=0, offload_activations=True).model)
    saved = next(handle for handle in engine.handles if isinstance(handle, saved_tensors.SavedTensors))
    saved.begin_block(model[0], [])
    values = torch.arange(6.0).view(2, 3)
    first = saved.pack(values.t())
    again = saved.pack(values[:, 1:])
    assert len(saved._store._stack) == 1  # both are of one storage
    found = again()
    assert torch.equal(found, values[:, 1:]) and found.stride() == (3, 1)
    assert torch.equal(first(), values.t()) and first().stride() == (1, 3)
    values.add_(1)
    assert torch.equal(saved.pack(values)(), values)
    with pytest.raises(LifecycleError, match="version 1, expected 0"):
        first()


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    grads = []
    for away in (False, True):
        model = models.build("gpt2").eval()
        sharded = hf_zero.shard(model, stage=0, offload_activations=away)
        loss = loss_of(model(**models.batch("gpt2", seed=0)))
        for retain in (True, False):
            loss.backward(retain_graph=retain)
        grads.append({name: sharded.full_grad(name) for name, _ in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items() if grad is not None)


def test_hooks_of_a_user_are_left_alone():
    model = models.build("llama")
    sharded = hf_zero.shard(model, stage=3, strict=True, offload_activations=True)
    sent, packed = engine_of(sharded.model).comm.counters.sent_nbytes, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
        loss = loss_of(model(**models.batch("llama", seed=0)))
    loss.backward()
    seen = len(packed)
    assert sent.get("down", 0) == 0
    loss_of(model(**models.batch("llama", seed=0))).backward()
    assert sent["down"] > 0, "without them the same is moved"
    plain = models.build("llama")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
        plain(**models.batch("llama", seed=0))
    assert seen == len(packed) - seen, "the user's hooks see all that blocks save"


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UnsupportedError, match="offload_activations: Linear has no repeated blocks"):
        hf_zero.shard(nn.Linear(4, 4), stage=3, offload_activations=True)
    with pytest.raises(UnsupportedError, match="offload_activations: Linear has no repeated blocks"):
        refuse_impossible(nn.Linear(4, 4), ZeroConfig(offload_activations=True), 2)  # as `plan` asks


def test_unshard_gives_the_blocks_their_forward_back():
    model = models.build("llama")
    sharded = hf_zero.shard(model, stage=3, strict=True, offload_activations=True)
    loss_of(model(**models.batch("llama", seed=0))).backward()
    sharded.unshard()
    assert "forward" not in model.model.layers[0].__dict__


class Conjugating(nn.Module):
    """A block whose product saves the conjugate of a complex tensor, and which may be given a sparse one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, hidden, sparse):
        values = torch.view_as_complex(torch.stack([hidden, self.weight * hidden], -1))
        return torch.sparse.mm(sparse, (values * (values.sin().conj() * self.weight)).imag)


def test_complex_and_sparse_tensors_come_back_as_they_were():
    grads = []
    for away in (False, True):
        model = nn.Sequential()
        model.blocks = nn.ModuleList([Conjugating(), Conjugating()])
        sharded = hf_zero.shard(model, stage=3, strict=True, offload_activations=away)
        hidden = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        for block in model.blocks:
            hidden = block(hidden, torch.eye(4).to_sparse())
        hidden.square().sum().backward()
        grads.append([sharded.full_grad(name) for name, _ in model.named_parameters()])
    assert grads[0][0].abs().min() > 0
    torch.testing.assert_close(*grads, rtol=0, atol=0)
