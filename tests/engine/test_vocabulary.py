"""An untied embedding and a head are units of their own, whatever their weights are used for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hf_zero.engine import engine_of, partition
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import ranks
from tests.engine.reference import assert_like_plain_torch
from tests.tiers import in_core


@contextmanager
def _any_size() -> Iterator[None]:
    """Any embedding and head are large enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "VOCABULARY_NUMEL", 0)
        yield


def _batch(rank: int, step: int) -> dict:
    return models.batch("llama", seed=10 * step + rank)


def _loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)


def one_backward(model, rank, step):
    loss = model(**_batch(rank, step)).loss
    loss.backward()
    return [loss.detach()]


def two_forwards_before_a_backward(model, rank, step):
    first, second = (model(**_batch(rank, step + 5 * each)).loss for each in range(2))
    (first + 2 * second).backward()
    return [first.detach(), second.detach()]


def an_evaluation_before_the_backward(model, rank, step):
    loss = model(**_batch(rank, step)).loss
    with torch.no_grad():
        evaluated = model(**_batch(rank, step + 5)).loss
    loss.backward()
    return [loss.detach(), evaluated]


def the_heads_weight_outside_of_all_forwards(model, rank, step):
    """Losses that make no logits take the weight itself."""
    batch = _batch(rank, step)
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state
    loss = _loss(hidden @ model.lm_head.weight.t(), batch)
    with torch.no_grad():
        model(**batch)
    loss.backward()
    return [loss.detach()]


def the_head_called_alone(model, rank, step):
    batch = _batch(rank, step)
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state
    loss = _loss(model.lm_head(hidden), batch)
    loss.backward()
    return [loss.detach()]


def embeddings_made_before_the_forward(model, rank, step):
    batch = _batch(rank, step)
    embedded = model.get_input_embeddings()(batch.pop("input_ids"))
    loss = model(inputs_embeds=embedded, **batch).loss
    loss.backward()
    return [loss.detach()]


def no_embeddings(model, rank, step):
    batch = _batch(rank, step)
    shape = (*batch.pop("input_ids").shape, model.config.hidden_size)
    loss = model(inputs_embeds=torch.linspace(-1, 1, shape[0] * shape[1] * shape[2]).view(shape), **batch).loss
    loss.backward()
    return [loss.detach()]


def _assert_nothing_stays(model) -> None:
    engine = engine_of(model)  # plain torch has none
    assert engine is None or not engine.head_stays, "the next backward reduces the head as early as it can"


def a_head_between_the_blocks(model, rank, step):
    batch, early = _batch(rank, step), []
    hook = model.model.layers[1].register_forward_hook(
        lambda _module, _args, hidden: early.append(model.lm_head(hidden))
    )
    loss = model(**batch).loss
    hook.remove()
    loss = loss + _loss(early[0], batch)
    loss.backward()
    _assert_nothing_stays(model)
    return [loss.detach()]


def a_head_before_the_blocks(model, rank, step):
    batch = _batch(rank, step)
    shape = (*batch["input_ids"].shape, model.config.hidden_size)
    loss = _loss(model.lm_head(torch.linspace(-1, 1, shape[0] * shape[1] * shape[2]).view(shape)), batch)
    loss = loss + model(**batch).loss
    loss.backward()
    _assert_nothing_stays(model)
    return [loss.detach()]


def the_embedding_called_behind_a_loss_of_the_heads_weight(model, rank, step):
    """Backward reads the head's weight in the slot that the embedding has taken meanwhile."""
    batch = _batch(rank, step)
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state
    loss = _loss(hidden @ model.lm_head.weight.t(), batch)
    with torch.no_grad():
        model.get_input_embeddings()(batch["input_ids"])
    loss.backward()
    return [loss.detach()]


def a_penalty_before_the_forward(model, rank, step):
    loss = model.lm_head.weight.square().mean()
    loss = loss + model(**_batch(rank, step)).loss
    loss.backward()
    return [loss.detach()]


def with_the_head_at_two_places():
    model = models.build("llama")
    model.model.same_head = model.lm_head
    return model


def with_the_head_frozen():
    model = models.build("llama")
    model.lm_head.weight.requires_grad_(False)
    return model


def checkpointed(model, rank, step, use_reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return one_backward(model, rank, step)


def only_the_blocks_are_trained():
    model = models.build("llama")
    for each in (model.get_input_embeddings(), model.lm_head):
        each.weight.requires_grad_(False)
    return model


ACTS = (
    two_forwards_before_a_backward,
    embeddings_made_before_the_forward,
    a_head_between_the_blocks,
    the_embedding_called_behind_a_loss_of_the_heads_weight,
    partial(checkpointed, use_reentrant=True),
)
MORE_ACTS = (
    one_backward,
    an_evaluation_before_the_backward,
    the_heads_weight_outside_of_all_forwards,
    the_head_called_alone,
    no_embeddings,
    a_head_before_the_blocks,
    partial(checkpointed, use_reentrant=False),
)


@pytest.mark.direct
@pytest.mark.parametrize(
    "acts", [pytest.param(ACTS, id="some"), pytest.param(MORE_ACTS, id="others", marks=pytest.mark.full("more cases"))]
)
@pytest.mark.parametrize("num_ranks", in_core([2], [2, 1, 3]))
@ranks("num_ranks")
def test_embedding_and_head_train_as_in_plain_torch_however_they_are_used(num_ranks, acts):
    with _any_size():
        assert partition.partition(models.build("llama")).units[-1].name == "lm_head"
        for act in acts:
            assert_like_plain_torch(partial(models.build, "llama"), act)


@pytest.mark.direct
@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("num_ranks", [2, 1, 3])
@ranks("num_ranks")
def test_an_embedding_or_a_head_that_is_frozen_or_used_elsewhere_trains_as_in_plain_torch(num_ranks):
    with _any_size():
        assert_like_plain_torch(only_the_blocks_are_trained, one_backward)
        assert_like_plain_torch(with_the_head_frozen, the_embedding_called_behind_a_loss_of_the_heads_weight)
        with pytest.raises(LifecycleError, match="lm_head.weight: is used before the blocks or between them"):
            assert_like_plain_torch(partial(models.build, "llama"), a_penalty_before_the_forward, stages=(2,))
        assert_like_plain_torch(with_the_head_at_two_places, a_penalty_before_the_forward, stages=(0, 1, 2))
        assert_like_plain_torch(partial(models.build, "llama"), one_backward, stages=(2, 3), offload="optimizer")
