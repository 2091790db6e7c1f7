"""Losses on whatever part of a transformers model: logits, backbone, hidden states, attentions, cache."""

import pytest
from torch import nn

from tests import models
from tests.distributed import ranks
from tests.engine.models import loss_of, token_ids
from tests.engine.reference import assert_exact_or_refused, assert_like_plain_torch


def tiny_llama(tied: bool):
    model = models.llama(tied=tied, hidden=16, vocab=32)
    model.config.use_cache = False
    return model


def tied_llama():
    return tiny_llama(True)


def untied_llama():
    return tiny_llama(False)


def logits_outside(model, rank, step):
    ids = token_ids(rank, step)
    logits = model(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return [loss.detach()]


def backbone_then_head(model, rank, step):
    ids = token_ids(rank, step)
    hidden = model.model(input_ids=ids).last_hidden_state
    loss = nn.functional.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return [loss.detach()]


def hidden_states_of_all_layers(model, rank, step):
    output = model(input_ids=token_ids(rank, step), output_hidden_states=True)
    loss = sum(loss_of(hidden) * (1 + index) for index, hidden in enumerate(output.hidden_states))
    loss.backward()
    return [loss.detach()]


def one_hidden_state(model, rank, step):
    loss = loss_of(model(input_ids=token_ids(rank, step), output_hidden_states=True).hidden_states[1])
    loss.backward()
    return [loss.detach()]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("act", [logits_outside, backbone_then_head, hidden_states_of_all_layers, one_hidden_state])
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_parts_of_a_language_model(act):
    for build in (tied_llama, untied_llama):
        assert_like_plain_torch(build, act)


def tiny_bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    return BertModel(config).eval()


def attention_distillation(index):
    def act(model, rank, step):
        attentions = model(input_ids=token_ids(rank, step), output_attentions=True).attentions
        loss = 100 * sum(loss_of(attention) for attention in attentions[index])
        loss.backward()
        return [loss.detach()]

    return act


@ranks(2)
def test_a_loss_on_attentions_alone_is_exact_or_refused():
    for index in (slice(None), slice(1, 2), slice(3, 4)):
        assert_exact_or_refused(tiny_bert, attention_distillation(index))


def cache_with_gradients(model, rank, step):
    """The loss of a continuation flows into the prefix through its cached keys and values only."""
    ids = token_ids(rank, step)
    prefix = model(input_ids=ids[:, :4], use_cache=True)
    output = model(input_ids=ids[:, 4:], past_key_values=prefix.past_key_values, use_cache=True)
    loss = loss_of(output.logits)
    loss.backward()
    return [loss.detach()]


@ranks(2)
def test_gradients_that_flow_through_a_cache_are_exact_or_refused():
    assert_exact_or_refused(untied_llama, cache_with_gradients)
