"""Generation with a cache: every rank runs as many forwards as the longest, and gets its own continuation."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from tests.distributed import run_ranks
from tests.engine.models import token_ids
from tests.engine.reference import SETTINGS, assert_away, assert_same_traffic, build_seeded


LIMIT = 60.0


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


@torch.no_grad()
def _generate(build, flagged, training, **options):
    """`flagged`: the model says that it is sharded, as FSDP's do, and `generate` synchronises by itself."""
    for stage in (1, 2, 3):
        model, reference = build_seeded(build), build_seeded(build)
        engine = hf_zero.shard(model, stage=stage, **SETTINGS)
        model.train(training)
        reference.train(training)
        if flagged:
            model._is_fsdp_managed_module = True
        else:
            options["synced_gpus"] = True
        # by rank: other prompts, other lengths of the continuation
        ids = token_ids(dist.get_rank(), 0, shape=(2, 3 + dist.get_rank()))
        options["max_new_tokens"] = 9 - 5 * dist.get_rank()
        found = model.generate(input_ids=ids, **options)
        wanted = reference.generate(input_ids=ids, **{**options, "synced_gpus": False})
        assert found.tolist() == wanted.tolist(), f"stage {stage}"
        if stage == 3:
            assert_away(model, engine)
            assert_same_traffic(engine)


@pytest.mark.parametrize("build", [tiny_llama, tiny_t5])
@pytest.mark.parametrize("flagged", [True, False])
def test_greedy_generation_that_ends_at_different_lengths(build, flagged):
    run_ranks(_greedy, 2, build, flagged, timeout=LIMIT)


def _greedy(build, flagged):
    _generate(build, flagged, False, do_sample=False)


def _beams():
    _generate(tiny_llama, True, False, do_sample=False, num_beams=2)


def test_beam_search_that_ends_at_different_lengths():
    run_ranks(_beams, 2, timeout=LIMIT)


def _generation_while_training():
    """A sample between two steps, and between a forward and its backward, changes neither."""
    from tests.engine.reference import assert_stages_match

    def act(model, rank, step):
        ids = token_ids(rank, step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.generate(
            input_ids=ids[:, :3],
            do_sample=False,
            max_new_tokens=4 + 2 * rank,
            synced_gpus=hf_zero.engine_of(model) is not None,
        )
        loss.backward()
        return [loss.detach()]

    assert_stages_match(tiny_llama, act)


def test_generation_between_a_forward_and_its_backward():
    run_ranks(_generation_while_training, 2, timeout=LIMIT)
