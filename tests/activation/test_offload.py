"""Activations in the host's memory: the same bits, and nothing of them left on the device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activation import offload
from hf_zero.activation.checkpointing import CheckpointFunction
from hf_zero.activation.offload import HostMemory, Offload, SavedStorage
from hf_zero.comm import Bus, Counters
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError
from tests import models
from tests.activation.subjects import (
    NOISE_NBYTES,
    checkpointed,
    gradients,
    held_between,
    host_nbytes,
    input_nbytes,
    rank_batch,
    used_nbytes,
)
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.tiers import more
from tests.training import Sharded, adamw, loss_of, train, train_accumulating


offloaded = pytest.mark.support("Activations: checkpointed inputs on the host", area="ZeRO-R")
offloaded_alone = pytest.mark.support("Activations: offload without gradient checkpointing", area="ZeRO-R")
WIDTH = 16
HALVES = (None, torch.bfloat16)


@contextmanager
def moving_all() -> Iterator[None]:
    """Moves storages of any size. Also decorates the body of a test on ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "MIN_NBYTES", 1)
        yield


@pytest.fixture(autouse=True)
def _moves_all():
    with moving_all():
        yield


def made(name: str, use_reentrant: bool | None, stage: int = 3, **settings) -> Sharded:
    """A trained model, with gradient checkpointing unless `use_reentrant` is `None`."""
    model = models.build(name)
    return Sharded(model if use_reentrant is None else checkpointed(model, use_reentrant), adamw, stage, **settings)


def _same_bits(stage: int, name: str, use_reentrant: bool | None, settings: dict, trains=train) -> None:
    records, grads = [], []
    with moving_all():
        for away in (False, True):
            trained = made(name, use_reentrant, stage, offload_activations=away, **settings)
            records.append(trains(trained, name, num_steps=2))
            loss_of(trained(**rank_batch(name, 9))).backward()
            grads.append(gradients(trained))
    assert_equal(*records, f"{name}, stage {stage}, reentrant {use_reentrant}")
    for key, grad in grads[0].items():
        assert (grad is None) is (grads[1][key] is None) and (grad is None or torch.equal(grad, grads[1][key])), key
    sent = trained.engine.comm.counters.sent_nbytes
    assert "offload" in settings or sent["down"] == sent["up"] > 0
    gc.collect()
    assert host_nbytes(trained.engine) == 0


@pytest.mark.quick(cases=2)
@offloaded
@pytest.mark.parametrize(
    "stage, use_reentrant", [(1, False), *more((1, True), (2, False)), (2, True), (3, False), (3, True)]
)
@ranks(2)
def test_losses_and_gradients_are_those_without_offload(stage, use_reentrant):
    _same_bits(stage, "llama", use_reentrant, {})


@offloaded_alone
@pytest.mark.full("slow")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("trains", [train, train_accumulating])
@pytest.mark.parametrize("use_reentrant", [None, False])
@ranks(2)
def test_losses_and_weights_are_those_without_offload(stage, trains, use_reentrant):
    _same_bits(stage, "llama", use_reentrant, {}, trains)


OTHERS = [
    *((name, False, {"compute_dtype": dtype}) for name in ("gpt2", "bert", "t5", "vit") for dtype in HALVES),
    *((name, None, {}) for name in ("gpt2", "t5", "albert", "mixtral")),
    ("llama", False, {"compute_dtype": torch.bfloat16}),
    ("llama", None, {"tiled_mlp": 3, "compute_dtype": torch.bfloat16}),
    ("llama", None, {"offload": "params"}),
]


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("name, use_reentrant, settings", OTHERS)
@ranks(2)
def test_offload_in_models_and_blocks_of_several_kinds(name, use_reentrant, settings):
    _same_bits(3, name, use_reentrant, settings)


@pytest.mark.quick
@offloaded
@pytest.mark.parametrize("stage", [*more(1, 2), 3])
@ranks(2)
@moving_all()
def test_offload_takes_the_inputs_of_all_blocks_but_the_last_off_the_device(stage):
    """What stays is the last block's input, which backward needs at once: all but one of so many are gone. The host's
    memory is mapped, and not the allocator's."""
    batch = rank_batch("llama", 0)
    plain = made("llama", False, stage)
    away = made("llama", False, stage, offload_activations=True)
    num_blocks, nbytes = len(away.engine.blocks), input_nbytes(away.engine, batch)
    held = held_between(plain.model, batch), held_between(away.model, batch)
    error = held[0] - held[1] - (num_blocks - 1) * nbytes
    assert abs(error) <= NOISE_NBYTES < nbytes, f"{held}, {nbytes} for each of {num_blocks} blocks"
    loss = loss_of(away(**batch))
    assert host_nbytes(away.engine) == (num_blocks - 1) * nbytes
    loss.backward()
    del loss
    assert host_nbytes(away.engine) == 0


@pytest.mark.quick
@ranks(1)
def test_what_all_blocks_but_the_last_keep_leaves_the_device_once():
    """What stays is what the last block keeps, which the backward needs at once."""
    batch = rank_batch("llama", 0)
    held = []
    with moving_all():
        for away in (False, True):
            trained = made("llama", None, strict=True, offload_activations=away)
            held.append(held_between(trained.model, batch))
        loss = loss_of(trained(**batch))
        moved = host_nbytes(trained.engine)
        # a block keeps the inputs of its two norms and of the MLP, queries, keys, values, attended values and more
        assert moved > (len(trained.engine.blocks) - 1) * 10 * input_nbytes(trained.engine, batch)
        assert abs(held[0] - held[1] - moved) <= 0.01 * moved + NOISE_NBYTES, (held, moved)
        loss.backward()
        del loss
        assert host_nbytes(trained.engine) == 0


def _llama(use_reentrant: bool = False) -> nn.Module:
    return checkpointed(models.build("llama"), use_reentrant)


def _adapted(use_reentrant: bool) -> nn.Module:
    """A frozen base with an adapter. The first block's input is then a leaf of the graph, made to need gradients."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.build("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    model = checkpointed(model, use_reentrant)
    model.enable_input_require_grads()
    return model


def _shifted() -> nn.Module:
    """Its blocks return views that begin within their storage, with the same values."""
    model = _llama()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: torch.cat([3 * output[:1] + 1, output])[1:])
    return model


class Tower(nn.Module):
    """Calls blocks through the checkpoint function, as transformers 5.17 and models of users do. The hooks of a block
    run again in the recomputation."""

    gradient_checkpointing = True

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(models.Block(13) for _ in range(4))
        self._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self._gradient_checkpointing_func(block, x, use_reentrant=False)
        return x.square().mean()


class Conjugating(nn.Module):
    """A block whose product saves the conjugate of a complex tensor, and which is given a sparse one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, hidden):
        values = torch.view_as_complex(torch.stack([hidden, self.weight * hidden], -1))
        return torch.sparse.mm(torch.eye(4).to_sparse(), (values * (values.sin().conj() * self.weight)).imag)


class Sharing(nn.Module):
    """A block that several others share an input with, and which saves it twice, transposed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, hidden, shared):
        return hidden + (hidden * shared.t() * self.scale).sin() * shared.t()


class Shared(nn.Module):
    """Blocks with an input that they share."""

    def __init__(self):
        super().__init__()
        self.shared, self.embed = nn.Parameter(torch.linspace(-1, 1, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Sharing() for _ in range(3))

    def forward(self, hidden):
        shared = self.shared.expand(WIDTH, WIDTH) * 1.0
        hidden = self.embed(hidden).sin()
        for block in self.blocks:
            hidden = block(hidden, shared)
        return hidden.sum()


def _batch(step: int) -> dict:
    return models.batch("llama", seed=step)


def one_forward(model, step):
    loss_of(model(**_batch(step))).backward()


def two_forwards(model, step):
    first, second = loss_of(model(**_batch(step))), loss_of(model(**_batch(step + 1)))
    (first + 2 * second).backward()


def forward_without_gradients_between(model, step):
    loss = loss_of(model(**_batch(step)))
    with torch.no_grad():
        model(**_batch(step + 1))
    loss.backward()


def failing_forward(model, step):
    handle = model.lm_head.register_forward_pre_hook(_fail)
    with pytest.raises(ValueError):
        model(**_batch(step))
    handle.remove()
    one_forward(model, step + 1)


def evaluation(model, step):
    one_forward(model.eval(), step)
    model.train()


def kept_graph(model, step):
    loss = loss_of(model(**_batch(step)))
    loss.backward(retain_graph=True)
    loss.backward()


def _fail(*_):
    raise ValueError


def all_inputs_but_the_last(model, step):
    loss = loss_of(model(**_batch(step)))
    engine = engine_of(model)
    if engine.config.offload_activations and step:  # which block is the last is learned from the backward before
        assert host_nbytes(engine) == (len(engine.blocks) - 1) * input_nbytes(engine, _batch(step))
    loss.backward()


def inputs_of_a_tower(model, step):
    loss = model(torch.linspace(-1, 1, 35).view(5, 7))
    if engine_of(model).config.offload_activations:  # 5 x 13 numbers of 4 bytes
        assert host_nbytes(engine_of(model)) == (4 if step == 0 else 3) * 260
    loss.backward()


def shared_storages(model, step):
    loss = model(torch.ones(WIDTH, WIDTH))
    if engine_of(model).config.offload_activations and step == 0:
        # of each block its input, two products and a sine; and what they share
        assert host_nbytes(engine_of(model)) == (3 * 4 + 1) * WIDTH**2 * 4
    loss.backward()


def complex_tensors(model, step):
    hidden = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(hidden).square().sum().backward()


USES = {
    **{
        act.__name__: (_llama, act)
        for act in (two_forwards, forward_without_gradients_between, failing_forward, evaluation)
    },
    "a kept graph": (lambda: models.build("gpt2").eval(), kept_graph),
    "a frozen base": (partial(_adapted, False), all_inputs_but_the_last),
    "a frozen base, reentrant": (partial(_adapted, True), all_inputs_but_the_last),
    "inputs that begin within their storage": (_shifted, one_forward),
    "blocks called through the checkpoint function": (Tower, inputs_of_a_tower),
    "complex and sparse tensors": (lambda: nn.Sequential(Conjugating(), Conjugating()), complex_tensors),
    "a storage of several tensors and blocks": (Shared, shared_storages),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_are_equal_and_nothing_stays_behind(use):
    build, act = USES[use]
    grads = []
    for away in (False, True):
        torch.manual_seed(0)
        model = build()
        stage = 0 if act is kept_graph else 3
        sharded = hf_zero.shard(model, stage=stage, strict=True, offload_activations=away)
        for step in range(2):
            act(model, step)
        grads.append({name: sharded.full_grad(name) for name, p in model.named_parameters() if p.requires_grad})
    assert any(grad is not None and grad.abs().max() > 0 for grad in grads[0].values())
    for name, grad in grads[0].items():
        assert grad is grads[1][name] is None or torch.equal(grad, grads[1][name]), name
    gc.collect()
    assert host_nbytes(engine_of(model)) == 0


@ranks(1)
@moving_all()
def test_all_blocks_but_the_last_are_moved_in_several_forwards_and_those_of_an_inner_module():
    trained = made("llama", False, strict=True, offload_activations=True)
    batch = rank_batch("llama", 0)
    nbytes, num_blocks = input_nbytes(trained.engine, batch), len(trained.engine.blocks)
    for num_forwards in (1, 1, 2, 2):
        # which block is the last is learned from the backward before, so two steps each
        hidden = [trained.model.model(batch["input_ids"]).last_hidden_state for _ in range(num_forwards)]
        found = host_nbytes(trained.engine)
        sum(each.square().mean() for each in hidden).backward()
        del hidden
        assert host_nbytes(trained.engine) == 0
    assert found == (2 * num_blocks - 1) * nbytes


@ranks(2)
@moving_all()
def test_unshard_restores_checkpoint_functions_and_forwards():
    trained = made("llama", False, offload_activations=True)
    loss_of(trained(**rank_batch("llama", 0))).backward()
    layer = trained.model.model.layers[0]
    assert isinstance(layer._gradient_checkpointing_func, CheckpointFunction)
    engine = trained.engine
    model = hf_zero.ShardedModel(engine).unshard()
    assert Offload.of(engine) is None and "forward" not in vars(layer)
    assert not isinstance(layer._gradient_checkpointing_func, CheckpointFunction)
    assert not model._forward_pre_hooks and not layer._forward_pre_hooks
    loss_of(model(**rank_batch("llama", 0))).backward()


@ranks(1)
@moving_all()
def test_a_model_may_be_checkpointed_when_it_is_sharded_already():
    """Trainer turns checkpointing on when the model is sharded already."""
    model = models.build("llama")
    engine = engine_of(hf_zero.shard(model, offload_activations=True))
    model.eval()(**rank_batch("llama", 0))
    checkpointed(model.train())
    for _ in range(2):
        loss = loss_of(model(**rank_batch("llama", 0)))
        assert host_nbytes(engine) > 0
        loss.backward()


def test_a_model_that_does_not_support_a_setting_is_refused():
    with pytest.raises(ConfigError, match="partition_activations: .* is not tensor-parallel; use offload_activations"):
        hf_zero.shard(model := models.build("mlp"), partition_activations=True)
    assert engine_of(model) is None
    for settings in ({"partition_activations": True}, {"offload_activations": True}):
        hf_zero.shard(models.build("mlp").requires_grad_(False), **settings)  # a teacher has none to move
    with pytest.raises(UnsupportedError, match="offload_activations: Linear has no repeated blocks"):
        hf_zero.shard(nn.Linear(4, 4), stage=3, offload_activations=True)
    sharded = hf_zero.shard(models.build("llama"), stage=3, offload_activations=True)
    with pytest.raises(UnsupportedError, match="offload_activations: does not work with compiled blocks"):
        hf_zero.compile_blocks(sharded, backend="eager")


def test_small_storages_stay(monkeypatch):
    monkeypatch.setattr(offload, "MIN_NBYTES", 2**20)
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


class SlowBus(Bus):
    """Its copies to the host are under way until they are waited for: memory that they read may be freed then."""

    def __init__(self):
        super().__init__(torch.device("cpu"), Counters())
        self.events: list[str] = []

    def down(self, host, device):
        super().down(host, device)
        return SimpleNamespace(is_done=lambda: False, wait=lambda: self.events.append("wait"))

    def up(self, device, host):
        self.events.append("read")
        return super().up(device, host)


@pytest.mark.quick
def test_memory_that_a_copy_uses_is_freed_after_the_copy():
    bus, values = SlowBus(), torch.arange(64, dtype=torch.uint8)
    memory = HostMemory(bus)
    saved = SavedStorage(values, bus, memory)
    assert used_nbytes(bus, memory) == 64 and saved.values is not None
    del saved  # a forward that failed
    assert used_nbytes(bus, memory) == 0 and bus.events == ["wait"]
    saved = SavedStorage(values, bus, memory)
    saved.num_tensors = 2
    saved.free_device()
    assert saved.values is None and bus.events == ["wait"] * 2
    for _ in range(4):  # two backwards
        assert torch.equal(saved.restore(), values)
    saved, bus.events = SavedStorage(values, bus, memory), []
    saved.num_tensors = 1
    for _ in range(2):  # the first backward takes the values from the device, while they are copied to the host
        assert torch.equal(saved.restore(), values)
    assert bus.events == ["wait", "read"]


@pytest.mark.quick
def test_host_memory_is_reused_for_the_smallest_buffer_that_fits():
    bus, sizes, held = Bus(torch.device("cpu"), Counters()), [], []
    empty, bus.synchronize = bus.empty, lambda: held.append(bus.host_nbytes)
    bus.empty = lambda nbytes, dtype: sizes.append(nbytes) or empty(nbytes, dtype)
    memory = HostMemory(bus)
    for _ in range(3):  # steps of one length
        buffers = [memory.take(nbytes) for nbytes in (100, 40, 100)]
        assert used_nbytes(bus, memory) == 240
        for buffer in buffers:
            memory.give(buffer)
    assert sizes == [100, 40, 100] and used_nbytes(bus, memory) == 0
    del buffers, buffer
    taken = [memory.take(nbytes) for nbytes in (30, 70, 300)]
    assert [buffer.numel() for buffer in taken] == [40, 100, 300]
    assert sizes == [100, 40, 100, 300] and used_nbytes(bus, memory) == 440  # the largest was replaced
    assert held[-1] == 240 and bus.host_nbytes == 440, "it is freed when no copy uses it"
