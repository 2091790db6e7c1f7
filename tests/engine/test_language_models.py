"""Losses on whatever part of a transformers model: logits, backbone, hidden states, attentions, cache, embedding and
head. An untied embedding and a head of some size are units of their own; here any size is enough."""

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
from tests.engine.models import loss_of, token_ids
from tests.engine.reference import assert_exact_or_refused, assert_like_plain_torch
from tests.tiers import in_core


@contextmanager
def _any_size() -> Iterator[None]:
    """Any embedding and head are large enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "VOCABULARY_NUMEL", 0)
        yield


def tied_llama():
    return models.build("llama-tied")


def llama():
    return models.build("llama")


def _batch(rank: int, step: int) -> dict:
    return models.batch("llama", seed=10 * step + rank)


def _loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)


def _hidden(model, batch):
    return model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state


def _floats(model, batch):
    """Hidden states that no embedding has made."""
    shape = (*batch["input_ids"].shape, model.config.hidden_size)
    return torch.linspace(-1, 1, shape[0] * shape[1] * shape[2]).view(shape)


def own_loss(model, rank, step):
    return model(**_batch(rank, step)).loss


def two_forwards_before_a_backward(model, rank, step):
    return [own_loss(model, rank, step), 2 * own_loss(model, rank, step + 5)]


def an_evaluation_before_the_backward(model, rank, step):
    loss = own_loss(model, rank, step)
    with torch.no_grad():
        return [loss, own_loss(model, rank, step + 5)]


def logits_outside(model, rank, step):
    batch = _batch(rank, step)
    return _loss(model(input_ids=batch["input_ids"]).logits, batch)


def hidden_states_of_all_layers(model, rank, step):
    states = model(input_ids=_batch(rank, step)["input_ids"], output_hidden_states=True).hidden_states
    return sum(loss_of(hidden) * (1 + index) for index, hidden in enumerate(states))


def one_hidden_state(model, rank, step):
    return loss_of(model(input_ids=_batch(rank, step)["input_ids"], output_hidden_states=True).hidden_states[1])


def the_heads_weight_outside_of_all_forwards(model, rank, step):
    """Losses that make no logits take the weight itself."""
    batch = _batch(rank, step)
    loss = _loss(_hidden(model, batch) @ model.lm_head.weight.t(), batch)
    with torch.no_grad():
        model(**batch)
    return loss


def the_head_called_alone(model, rank, step):
    batch = _batch(rank, step)
    return _loss(model.lm_head(_hidden(model, batch)), batch)


def embeddings_made_before_the_forward(model, rank, step):
    batch = _batch(rank, step)
    return model(inputs_embeds=model.get_input_embeddings()(batch.pop("input_ids")), **batch).loss


def no_embeddings(model, rank, step):
    batch = _batch(rank, step)
    embeds = _floats(model, batch)
    del batch["input_ids"]
    return model(inputs_embeds=embeds, **batch).loss


def _with_nothing_kept(model, loss):
    loss.backward()
    engine = engine_of(model)  # plain torch has none
    assert engine is None or not engine.head_stays, "the next backward reduces the head as early as it can"
    return loss.detach()


def a_head_between_the_blocks(model, rank, step):
    batch, early = _batch(rank, step), []
    hook = model.model.layers[1].register_forward_hook(
        lambda _module, _args, hidden: early.append(model.lm_head(hidden))
    )
    loss = model(**batch).loss
    hook.remove()
    return _with_nothing_kept(model, loss + _loss(early[0], batch))


def a_head_before_the_blocks(model, rank, step):
    batch = _batch(rank, step)
    loss = _loss(model.lm_head(_floats(model, batch)), batch)
    return _with_nothing_kept(model, loss + model(**batch).loss)


def the_embedding_called_behind_a_loss_of_the_heads_weight(model, rank, step):
    """Backward reads the head's weight in the slot that the embedding has taken meanwhile."""
    batch = _batch(rank, step)
    loss = _loss(_hidden(model, batch) @ model.lm_head.weight.t(), batch)
    with torch.no_grad():
        model.get_input_embeddings()(batch["input_ids"])
    return loss


def the_heads_weight_behind_a_call_of_the_embedding(model, rank, step):
    """The weight is there again, though the embedding has taken its slot."""
    batch = _batch(rank, step)
    hidden = _hidden(model, batch)
    with torch.no_grad():
        model.get_input_embeddings()(batch["input_ids"])
    return _loss(hidden @ model.lm_head.weight.t(), batch)


def a_penalty_before_the_forward(model, rank, step):
    return model.lm_head.weight.square().mean() + own_loss(model, rank, step)


def checkpointed(model, rank, step, use_reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return own_loss(model, rank, step)


ACTS = (
    logits_outside,
    hidden_states_of_all_layers,
    two_forwards_before_a_backward,
    embeddings_made_before_the_forward,
    a_head_between_the_blocks,
    the_embedding_called_behind_a_loss_of_the_heads_weight,
    the_heads_weight_behind_a_call_of_the_embedding,
    partial(checkpointed, use_reentrant=True),
)
MORE_ACTS = (
    own_loss,
    one_hidden_state,
    an_evaluation_before_the_backward,
    the_heads_weight_outside_of_all_forwards,
    the_head_called_alone,
    no_embeddings,
    a_head_before_the_blocks,
    partial(checkpointed, use_reentrant=False),
)


@pytest.mark.direct
@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "acts", [pytest.param(ACTS, id="some"), pytest.param(MORE_ACTS, id="others", marks=pytest.mark.full("more cases"))]
)
@pytest.mark.parametrize("num_ranks", in_core([2], [2, 1, 3]))
@ranks("num_ranks")
def test_embedding_and_head_train_as_in_plain_torch_however_they_are_used(num_ranks, acts):
    with _any_size():
        assert partition.partition(llama()).units[-1].name == "lm_head"
        for act in acts:
            assert_like_plain_torch(llama, act)


@pytest.mark.parametrize("act", [logits_outside, the_head_called_alone, hidden_states_of_all_layers])
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_parts_of_a_model_whose_head_is_its_embedding(act):
    assert_like_plain_torch(tied_llama, act)


def with_the_head_at_two_places():
    model = llama()
    model.model.same_head = model.lm_head
    return model


def with_frozen(*names: str):
    model = llama()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.direct
@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("num_ranks", [2, 1, 3])
@ranks("num_ranks")
def test_an_embedding_or_a_head_that_is_frozen_or_used_elsewhere_trains_as_in_plain_torch(num_ranks):
    head = "lm_head.weight"
    with _any_size():
        assert_like_plain_torch(partial(with_frozen, head, "model.embed_tokens.weight"), own_loss)
        assert_like_plain_torch(partial(with_frozen, head), the_embedding_called_behind_a_loss_of_the_heads_weight)
        with pytest.raises(LifecycleError, match=f"{head}: is used before the blocks or between them"):
            assert_like_plain_torch(llama, a_penalty_before_the_forward, stages=(2,))
        assert_like_plain_torch(with_the_head_at_two_places, a_penalty_before_the_forward, stages=(0, 1, 2))
        assert_like_plain_torch(llama, own_loss, stages=(2, 3), offload="optimizer")


def eager_bert():
    model = models.build("bert")
    model.set_attn_implementation("eager")
    return model


@ranks(2)
def test_a_loss_on_attentions_alone_is_exact_or_refused():
    for index in (slice(None), slice(1, 2), slice(2, 3)):

        def act(model, rank, step, index=index):
            attentions = model(input_ids=token_ids(rank, step), output_attentions=True).attentions
            return 100 * sum(loss_of(attention) for attention in attentions[index])

        assert_exact_or_refused(eager_bert, act)


def cache_with_gradients(model, rank, step):
    """The loss of a continuation flows into the prefix through its cached keys and values only."""
    ids = _batch(rank, step)["input_ids"]
    prefix = model(input_ids=ids[:, :4], use_cache=True)
    return loss_of(model(input_ids=ids[:, 4:], past_key_values=prefix.past_key_values, use_cache=True).logits)


@ranks(2)
def test_gradients_that_flow_through_a_cache_are_exact_or_refused():
    assert_exact_or_refused(llama, cache_with_gradients)
