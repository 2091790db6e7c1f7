"""Sequences that several ranks share: loss and gradients are those of one process with the whole sequences."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.activation import sequence_parallel_of
from hf_zero.activation.sequence import SequenceParallel
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, UnsupportedError
from tests import models
from tests.activation.sequences import Case, batch_of, build, compare
from tests.activation.subjects import held_between
from tests.distributed import run_ranks
from tests.tiers import more


FEW = [
    Case("llama", kind="packed", length=12, use_reentrant=False, settings={"offload_activations": True}),
    Case("qwen3", 2, use_reentrant=True),
    Case("gemma3_text", length=16),
    Case("gpt2", 1, kind="packed"),
]
OTHERS = [
    *(Case("llama", stage) for stage in (0, 1, 2, 3)),
    Case("llama", kind="whole", use_reentrant=True, settings={"offload_activations": True}),
    Case("llama", attention="eager", lora=True, use_reentrant=False),
    Case("qwen3", 2, kind="packed"),
    Case("mistral", 1, length=16),
    Case("gemma2", attention="eager", length=16, kind="packed"),
    Case("gpt2", 2, use_reentrant=False),
    Case("gpt2", kind="packed", length=12),
    Case("mixtral", kind="packed"),
    Case("gpt_oss", attention="eager"),
    Case("gemma3_text", 2, settings={"chunked_loss": "on"}),
]
FOUR = [Case("llama"), Case("qwen3", 2, kind="packed", use_reentrant=False), Case("mixtral", 1, length=16)]


def _compare_all(cases: list[Case], num_parts: int) -> None:
    for case in cases:
        compare(case, num_parts)


@pytest.mark.parametrize("cases", [FEW, *more(OTHERS)], ids=["few", "others"])
def test_two_ranks_that_share_sequences_train_as_one_with_whole_ones(cases):
    run_ranks(_compare_all, 2, cases, 2)


@pytest.mark.full("more cases")
@pytest.mark.parametrize("num_parts", [2, 4])
def test_four_ranks_share_sequences_by_twos_and_all(num_parts):
    """With four parts heads of keys are repeated."""
    run_ranks(_compare_all, 4, FOUR, num_parts)


class NoAttention(nn.Module):
    """An attention of its own, which transformers does not know."""

    def forward(self, hidden_states, **_):
        return hidden_states.cumsum(1), None


def _refuses() -> None:
    case = Case("llama", kind="whole")
    rank, batch = dist.get_rank(), batch_of(case, 0)
    for name, match in (("bert", "BertForSequenceClassification is no causal"), ("t5", "has an encoder and a dec")):
        with pytest.raises(UnsupportedError, match=match):
            hf_zero.shard(models.build(name), sequence_parallel=2)
    with pytest.raises(ConfigError, match="sequence_parallel: 2 ranks cannot form groups of 3; give a divisor of 2"):
        hf_zero.shard(build("llama"), sequence_parallel=3)
    model = build("llama")
    model.model.layers[1].self_attn = NoAttention()
    hf_zero.shard(model, sequence_parallel=2)
    with pytest.raises(UnsupportedError, match="LlamaDecoderLayer has not looked up its attention in transformers'"):
        model(**batch)
    model = build("llama")
    hf_zero.shard(model, sequence_parallel=2)
    for asked in ("output_hidden_states", "output_router_logits"):
        with pytest.raises(UnsupportedError, match=f"sequence_parallel: {asked} with labels needs whole sequences"):
            model(**batch, **{asked: True})
    sequences = sequence_parallel_of(engine_of(model))
    assert isinstance(sequences, SequenceParallel)
    with sequences.whole(), torch.no_grad():
        assert model(**batch).logits.shape[1] == case.length
    with pytest.raises(ConfigError, match="the 2 ranks of a sequence group were given different batches; give neighb"):
        model(**batch_of(case, rank))
    before = sequences.comm.counters.sent_nbytes.get("exchange", 0)
    model(**batch).loss.backward()
    # of each of four exchanged tensors, in three blocks, half of the padded part goes out, and comes back
    numel = 2 * 6 * (2 * models.HIDDEN + 2 * models.HIDDEN // 2)
    assert sequences.comm.counters.sent_nbytes["exchange"] - before == 2 * models.LAYERS * 4 * numel // 2


def test_what_cannot_be_divided_is_refused():
    run_ranks(_refuses, 2)


def _held(num_parts: int) -> int:
    model = models.llama(hidden=64, layers=4, vocab=256).train()
    model.config.use_cache = False
    hf_zero.shard(model, sequence_parallel=num_parts)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (1, 513), generator=generator)
    return held_between(model, {"input_ids": ids, "labels": ids})


@pytest.mark.full("slow")
def test_two_ranks_that_share_sequences_hold_half_of_the_activations():
    [whole], halves = run_ranks(_held, 1, 1), run_ranks(_held, 2, 2)
    assert max(halves) < 0.55 * whole, f"{halves} of {whole}"
