"""Sequences that several ranks share: loss and gradients are those of one process with the whole sequences."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache

import hf_zero
from hf_zero.activation.sequence import SequenceParallel, divided_forward
from hf_zero.compat import replaced
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, UnsupportedError
from tests import models
from tests.activation.sequences import FLASH, Case, batch_of, build, compare
from tests.activation.subjects import held_between
from tests.distributed import ranks, run_ranks
from tests.tiers import in_core


FEW = [
    Case("llama", kind="packed", length=12, use_reentrant=False, settings={"offload_activations": True}),
    Case("qwen3", 2, use_reentrant=True),
    Case("gemma3_text", kind="packed", length=16, attention=FLASH, use_reentrant=False),
    Case("starcoder2", 1, kind="packed", settings={"tiled_mlp": 2}),
]
OTHERS = [
    *(Case("llama", stage) for stage in (0, 1, 2, 3)),
    Case("llama", kind="whole", use_reentrant=True, settings={"offload_activations": True}),
    Case("llama", attention="eager", adapter="lora", use_reentrant=False),
    Case("qwen3", 2, kind="packed"),
    Case("mistral", 1, length=16),
    Case("mistral", kind="packed", length=16),
    Case("gemma3_text", length=16),
    Case("gemma3_text", kind="packed", length=17),
    Case("gemma2", attention="eager", length=16, kind="packed"),
    Case("llama", adapter="lora", use_reentrant=False, settings={"tiled_mlp": 3}),
    Case("starcoder2", 2, use_reentrant=False),
    Case("mixtral", kind="packed"),
    Case("gpt_oss", attention="eager"),
    Case("gemma3_text", 2, settings={"chunked_loss": "on"}),
]
BY_FLASH = [
    Case("mistral", kind="packed", length=16, attention=FLASH, use_reentrant=True),
    Case("mistral", 2, kind="whole", length=16, attention=FLASH),
    Case("llama", attention=FLASH, use_reentrant=False),
    Case("qwen3", kind="joined", attention=FLASH, use_reentrant=False),
    Case("gemma3_text", length=16, attention=FLASH),
]
ADAPTED = [
    Case("gemma3_text", 2, adapter="lora", kind="packed", length=16),
    Case("llama", adapter="dora", kind="packed"),
]
ELSEWHERE = [
    Case("llama", dtype=torch.bfloat16),
    Case("gemma3_text", 2, length=16, settings={"compute_dtype": torch.bfloat16}),
    Case("llama", settings={"gather_dtype": torch.int8}),
    Case("llama", kind="packed", settings={"offload": "params", "offload_activations": True}),
    Case("qwen3", 2, settings={"offload": "optimizer"}),
]
FOUR = [Case("llama"), Case("qwen3", 2, kind="packed", use_reentrant=False), Case("mixtral", 1, length=16)]
FOUR += [
    Case("llama", settings={"shard_size": 2}),
    Case("qwen3", 1, settings={"shard_size": 2, "shared_memory": False}),
    Case("llama", 2, settings={"shard_size": "auto"}, on_two_hosts=True),
]


def _compare_all(cases: list[Case], num_parts: int) -> None:
    for case in cases:
        compare(case, num_parts)


SETS = {"few": FEW, "others": OTHERS, "flash": BY_FLASH, "adapters": ADAPTED, "settings": ELSEWHERE}


@pytest.mark.parametrize("cases", in_core([FEW], SETS.values()), ids=SETS)
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


class Shaping(nn.Module):
    """An attention that knows how long a sequence is."""

    def forward(self, hidden_states, **_):
        return hidden_states.view(2, 11, -1), None


def _names_its_cache_anew(model: nn.Module, args: tuple, output) -> None:
    """As transformers has done since 5.24."""
    if "past_key_values" in output:
        output["cache"] = output.past_key_values


@ranks(2)
def test_what_cannot_be_divided_is_refused():
    case = Case("llama", kind="whole")
    batch = batch_of(case, 0)
    for name, match in (
        ("bert", "BertForSequenceClassification is not a causal"),
        ("t5", "has an encoder and a dec"),
        ("gpt2", "GPT2Model reshapes the output of its blocks to full sequences"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            hf_zero.shard(models.build(name), sequence_parallel=2)
    with pytest.raises(ConfigError, match="sequence_parallel: 2 ranks cannot form groups of 3; give a divisor of 2"):
        hf_zero.shard(build("llama"), sequence_parallel=3)
    model = build("llama")
    model.model.layers[1].add_module("mixing", nn.Conv1d(4, 4, 1))
    with pytest.raises(UnsupportedError, match="mixes positions with Conv1d, only attention"):
        hf_zero.shard(model, sequence_parallel=2)
    assert engine_of(model) is None
    model = build("llama")
    model.config.layerdrop = 0.1
    with pytest.raises(
        UnsupportedError,
        match="LlamaForCausalLM would drop different blocks on each rank; set model",
    ):
        hf_zero.shard(model, sequence_parallel=2)
    model = build("llama")
    model.model.layers[1].self_attn = NoAttention()
    hf_zero.shard(model, sequence_parallel=2)
    with pytest.raises(UnsupportedError, match="LlamaDecoderLayer does not use transformers' AttentionInterface"):
        model(**batch)
    hf_zero.ShardedModel(model).unshard()
    model = build("llama")
    model.model.layers[1].self_attn = Shaping()
    hf_zero.shard(model, sequence_parallel=2)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        model(**batch)
    hf_zero.ShardedModel(model).unshard()
    model = build("llama")
    hf_zero.shard(model, sequence_parallel=2, chunked_loss="on")
    assert "forward" in vars(model.lm_head)
    model(**batch).loss.backward()
    hf_zero.ShardedModel(model).unshard()
    assert "forward" not in vars(model.lm_head)
    assert model(**batch).logits.shape[1] == case.length
    eager = AttentionInterface().get_interface("eager", len)
    assert eager is len, "outside of a divided forward nothing is exchanged"
    model = build("llama")
    model.register_forward_hook(_names_its_cache_anew)
    hf_zero.shard(model, sequence_parallel=2)
    output = model(**batch)
    assert (output["cache"], output["past_key_values"]) == (None, None), "they are those of a part"
    output.loss.backward()
    for cache in ("past_key_values", "cache"):
        with pytest.raises(UnsupportedError, match=f"sequence_parallel: {cache} with labels needs full sequences"):
            model(**batch, **{cache: DynamicCache()})
    for asked in ("output_hidden_states", "output_router_logits"):
        with pytest.raises(UnsupportedError, match=f"sequence_parallel: {asked} with labels needs full sequences"):
            model(**batch, **{asked: True})
    model.config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match="output_hidden_states with labels needs full sequences on each rank"):
        model(**batch)
    model.config.output_hidden_states = False
    sequences = SequenceParallel.of(engine_of(model))
    assert isinstance(sequences, SequenceParallel)
    with replaced(sequences, is_active=False), torch.no_grad():
        assert model(**batch).logits.shape[1] == case.length
    before = sequences.comm.counters.sent_nbytes.get("exchange", 0)
    model(**batch).loss.backward()
    # of each of four exchanged tensors, in three blocks, half of the padded part goes out, and comes back
    numel = 2 * 6 * (2 * models.HIDDEN + 2 * models.HIDDEN // 2)
    assert sequences.comm.counters.sent_nbytes["exchange"] - before == 2 * models.LAYERS * 4 * numel // 2
    _recovers_from_interrupts(model, batch)
    _refuses_other_checkpoints(batch)


def _recovers_from_interrupts(model: nn.Module, batch: dict) -> None:
    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(**batch)
    handle.remove()
    model(**batch).loss.backward()
    assert divided_forward() is None


class Checkpointed(nn.Module):
    """An attention whose activations a checkpoint function that is not transformers' leaves out."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        return checkpoint(self.inner, use_reentrant=False, **kwargs)


def _refuses_other_checkpoints(batch: dict) -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn = Checkpointed(layer.self_attn)
    hf_zero.shard(model, sequence_parallel=2)
    loss = model(**batch).loss
    with pytest.raises(UnsupportedError, match="LlamaAttention is recomputed in backward by an unsupported"):
        loss.backward()
    hf_zero.ShardedModel(model).unshard()
    loss = model(**batch).loss  # whole sequences again
    loss.backward()


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
