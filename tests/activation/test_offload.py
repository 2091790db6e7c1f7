"""Inputs of checkpointed blocks in the host's memory: the same bits, and nothing of them left on the device."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.activation import checkpointing_of
from hf_zero.activation.checkpointing import CheckpointFunction
from hf_zero.engine import engine_of
from hf_zero.errors import UnsupportedError
from tests import models
from tests.activation.subjects import (
    NOISE_NBYTES,
    checkpointed,
    gradients,
    held_between,
    input_nbytes,
    rank_batch,
    store_of,
    subject,
)
from tests.distributed import run_ranks
from tests.tiers import more
from tests.training import assert_equal, loss_of, train, train_accumulating


offloaded = pytest.mark.support("Activations: checkpointed inputs on the host", area="ZeRO-R")


def _same_bits(stage: int, name: str, use_reentrant: bool, dtype: torch.dtype | None) -> None:
    records, grads = [], []
    for away in (False, True):
        trained = subject(name, stage, use_reentrant, compute_dtype=dtype, offload_activations=away)
        records.append(train(trained, name, num_steps=3))
        loss_of(trained(**rank_batch(name, 9))).backward()
        grads.append(gradients(trained))
    assert_equal(*records, f"{name}, stage {stage}, reentrant {use_reentrant}")
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        assert (grad is None) is (grads[1][key] is None) and (grad is None or torch.equal(grad, grads[1][key])), key
    sent = trained.engine.comm.counters.sent_nbytes
    assert sent["down"] == sent["up"] > 0


@pytest.mark.quick(cases=2)
@offloaded
@pytest.mark.parametrize(
    "stage, use_reentrant", [(1, False), *more((1, True), (2, False)), (2, True), (3, False), (3, True)]
)
def test_losses_and_gradients_are_those_without_offload(stage, use_reentrant):
    run_ranks(_same_bits, 2, stage, "llama", use_reentrant, None)


@offloaded
@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_in_models_of_several_kinds(stage, name, dtype):
    run_ranks(_same_bits, 2, stage, name, False, dtype)


def test_offload_in_one_process():
    run_ranks(_same_bits, 1, 3, "llama", False, torch.bfloat16)


def _leaves_the_device(stage: int) -> None:
    """What stays is the last block's input, which backward needs at once: all but one of so many are gone. The host's
    memory is mapped, and not the allocator's."""
    batch = rank_batch("llama", 0)
    plain = subject("llama", stage)
    away = subject("llama", stage, offload_activations=True)
    num_blocks, nbytes = len(away.engine.blocks), input_nbytes(away.engine, batch)
    held = held_between(plain.model, batch), held_between(away.model, batch)
    error = held[0] - held[1] - (num_blocks - 1) * nbytes
    assert abs(error) <= NOISE_NBYTES < nbytes, f"{held}, {nbytes} for each of {num_blocks} blocks"
    store = store_of(away.engine)
    loss = loss_of(away(**batch))
    assert store.arena.used_nbytes == (num_blocks - 1) * nbytes
    loss.backward()
    del loss
    assert (store.arena.used_nbytes, store.device_nbytes) == (0, 0)


@pytest.mark.quick
@offloaded
@pytest.mark.parametrize("stage", [*more(1, 2), 3])
def test_offload_takes_the_inputs_of_all_blocks_but_the_last_off_the_device(stage):
    run_ranks(_leaves_the_device, 2, stage)


def _hard_cases() -> None:
    batches = [rank_batch("llama", step) for step in range(3)]

    def two_forwards(trained):
        first, second = loss_of(trained(**batches[0])), loss_of(trained(**batches[1]))
        (first + 2 * second).backward()

    def forward_without_gradients_between(trained):
        loss = loss_of(trained(**batches[0]))
        with torch.no_grad():
            trained(**batches[1])
        loss.backward()

    def failing_forward(trained):
        with pytest.raises(ValueError):
            handle = trained.model.lm_head.register_forward_pre_hook(_fail)
            trained(**batches[0])
        handle.remove()
        loss_of(trained(**batches[1])).backward()

    def evaluation(trained):
        trained.model.eval()
        loss_of(trained(**batches[0])).backward()
        trained.model.train()

    for act in (two_forwards, forward_without_gradients_between, failing_forward, evaluation):
        grads = []
        for away in (False, True):
            trained = subject("llama", 3, offload_activations=away)
            for _ in range(2):
                act(trained)
            grads.append(gradients(trained))
        assert all(torch.equal(grad, grads[1][key]) for key, grad in grads[0].items()), act.__name__
        gc.collect()
        store = store_of(trained.engine)
        assert (store.arena.used_nbytes, store.device_nbytes) == (0, 0), act.__name__


def _fail(*_):
    raise ValueError


def test_several_forwards_and_failing_ones_leave_nothing_behind():
    run_ranks(_hard_cases, 2)


def _accumulates(stage: int) -> None:
    records = [
        train_accumulating(subject("llama", stage, offload_activations=away), "llama", num_steps=2)
        for away in (False, True)
    ]
    assert_equal(*records, f"stage {stage}")


@offloaded
@pytest.mark.parametrize("stage", [*more(1, 2), 3])
def test_offload_with_accumulation(stage):
    run_ranks(_accumulates, 2, stage)


def _is_taken_off() -> None:
    trained = subject("llama", 3, offload_activations=True)
    loss_of(trained(**rank_batch("llama", 0))).backward()
    layer = trained.model.model.layers[0]
    assert isinstance(layer._gradient_checkpointing_func, CheckpointFunction)
    engine = trained.engine
    assert checkpointing_of(engine) is not None
    model = hf_zero.ShardedModel(engine).unshard()
    assert checkpointing_of(engine) is None
    assert not isinstance(layer._gradient_checkpointing_func, CheckpointFunction)
    assert not model._forward_pre_hooks and not layer._forward_pre_hooks
    loss_of(model(**rank_batch("llama", 0))).backward()


def test_unshard_gives_the_checkpoint_functions_back():
    run_ranks(_is_taken_off, 2)


def _frozen_with_adapters(use_reentrant: bool) -> None:
    """The first block's input is then a leaf of the graph, made to need gradients."""
    from peft import LoraConfig, get_peft_model

    grads = []
    for away in (False, True):
        model = models.build("llama")
        model = checkpointed(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])), use_reentrant)
        model.enable_input_require_grads()
        engine = engine_of(hf_zero.shard(model, stage=3, offload_activations=away))
        for _ in range(2):
            loss = loss_of(model(**rank_batch("llama", 0)))
            if away:
                sent = store_of(engine).arena.used_nbytes
            loss.backward()
        grads.append(
            {
                name: hf_zero.ShardedModel(engine.model).full_grad(name)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
    assert sent == 2 * input_nbytes(engine, rank_batch("llama", 0)), "of three blocks all but the last"


@pytest.mark.parametrize("use_reentrant", [False, *more(True)])
def test_offload_with_a_frozen_backbone_and_adapters(use_reentrant):
    run_ranks(_frozen_with_adapters, 2, use_reentrant)


def _shift(_module, _args, output: torch.Tensor) -> torch.Tensor:
    """Returns the same values as a view that begins within its storage."""
    return torch.cat([3 * output[:1] + 1, output])[1:]


def _begins_within_its_storage() -> None:
    """The last one stays on the device."""
    grads = []
    for away in (False, True):
        torch.manual_seed(0)
        model = checkpointed(models.build("llama"), False)
        for layer in model.model.layers:
            layer.register_forward_hook(_shift)
        sharded = hf_zero.shard(model, offload_activations=away)
        for _ in range(2):  # which is the last is learned from the first
            loss_of(model(**rank_batch("llama", 0))).backward()
        grads.append({name: sharded.full_grad(name) for name, _ in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_inputs_that_begin_within_their_storage_are_read_where_they_lie():
    run_ranks(_begins_within_its_storage, 2)


def _enabled_afterwards() -> None:
    """Trainer turns checkpointing on when the model is sharded already."""
    model = models.build("llama")
    engine = engine_of(hf_zero.shard(model, offload_activations=True))
    model.eval()(**rank_batch("llama", 0))
    checkpointed(model.train())
    for _ in range(2):
        loss = loss_of(model(**rank_batch("llama", 0)))
        assert store_of(engine).arena.used_nbytes > 0
        loss.backward()


def test_a_model_may_be_checkpointed_when_it_is_sharded_already():
    run_ranks(_enabled_afterwards, 1)


def test_a_model_that_cannot_be_checkpointed_is_refused_where_that_is_needed():
    with pytest.raises(UnsupportedError, match="no module has the attribute 'gradient_checkpointing'"):
        hf_zero.shard(model := models.build("mlp"), partition_activations=True)
    assert engine_of(model) is None
    for settings in ({"partition_activations": True}, {"offload_activations": True}):
        hf_zero.shard(models.build("mlp").requires_grad_(False), **settings)  # a teacher has none to move


def _saving_on_the_cpu(*args):
    """What transformers' own `offload` does."""
    with torch.autograd.graph.save_on_cpu():
        return torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)


def _seen_by_nobody() -> None:
    trained = subject("llama", 3, offload_activations=True)
    for layer in trained.model.model.layers:
        layer._gradient_checkpointing_func = _saving_on_the_cpu
    with pytest.raises(UnsupportedError, match="already stored elsewhere; remove `offload`"):
        trained(**rank_batch("llama", 0))
    with pytest.raises(UnsupportedError, match="offload_activations: does not work with compiled blocks"):
        hf_zero.compile_blocks(trained.engine, backend="eager")
    trained = subject("llama", 3, offload_activations=True)
    layer = trained.model.model.layers[1]
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"hidden_states": args[0], **kwargs}), with_kwargs=True
    )
    with pytest.raises(UnsupportedError, match="inputs are passed by keyword"):
        trained(**rank_batch("llama", 0))


def test_inputs_that_do_not_come_by_are_refused():
    run_ranks(_seen_by_nobody, 1)


def _calls_blocks_through_the_function() -> None:
    """As transformers 5.17 and models of users do: the block's hooks run again in the recomputation."""

    class Tower(nn.Module):
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

    grads = []
    for away in (False, True):
        torch.manual_seed(0)
        model = Tower()
        engine = engine_of(hf_zero.shard(model, stage=3, offload_activations=away))
        for step in range(2):
            torch.manual_seed(step + dist.get_rank())
            loss = model(torch.randn(5, 7))
            if away:
                assert (
                    store_of(engine).arena.used_nbytes == (4 if step == 0 else 3) * 320
                )  # 5 x 13 numbers of 4 bytes, at multiples of 64
            loss.backward()
        grads.append([hf_zero.ShardedModel(engine.model).full_grad(name) for name, _ in model.named_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_blocks_that_are_called_through_the_checkpoint_function():
    run_ranks(_calls_blocks_through_the_function, 2)
