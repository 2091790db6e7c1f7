"""Generation with a cache: every rank runs as many forwards as the longest, and gets its own continuation."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import ranks, run_ranks
from tests.engine.models import token_ids
from tests.engine.reference import SETTINGS, assert_away, assert_like_plain_torch, assert_same_traffic, build_seeded


def tiny_llama(layers: int = 3):
    return models.llama(hidden=16, layers=layers, vocab=32)


def tiny_t5():
    return models.build("t5")


PROMPT_LENGTHS = (3, 5)  # by rank
NEW_TOKENS = (11, 4)

# What `generate` is asked for beside lengths, by the name of the feature.
GREEDY = {"do_sample": False}
BEAMS = {"do_sample": False, "num_beams": 2}
SAMPLING = {"do_sample": True, "top_k": 12, "temperature": 1.5}
LOOKUP = {"do_sample": False, "prompt_lookup_num_tokens": 2}
# A cache of fixed length has no room for the steps that a rank takes beyond its own, so all ranks ask for as many.
STATIC = {"do_sample": False, "cache_implementation": "static", "disable_compile": True, "max_new_tokens": 6}


def _tokens(model, rank: int, seed: int = 0, **options) -> list[list[int]]:
    """What a model goes on with: prompts and lengths differ by rank, so that the ranks end at different times."""
    is_assisted = {"assistant_model", "prompt_lookup_num_tokens"} & options.keys()
    ids = token_ids(rank, seed, shape=(1 if is_assisted else 2, PROMPT_LENGTHS[rank]))
    torch.manual_seed(10 + rank)
    return model.generate(input_ids=ids, **{"max_new_tokens": NEW_TOKENS[rank], **options}).tolist()


def _sharded_and_plain(build, stage, **settings):
    plain = build_seeded(build).eval()
    model = build_seeded(build).eval()
    return model, plain, engine_of(hf_zero.shard(model, stage=stage, **{**SETTINGS, **settings}))


def _generates(build, options, stage):
    rank = dist.get_rank()
    model, plain, engine = _sharded_and_plain(build, stage)
    for seed in range(2):
        assert _tokens(model, rank, seed, **options) == _tokens(plain, rank, seed, **options)
    if stage == 3:
        assert_away(model, engine)
        assert_same_traffic(engine)


@pytest.mark.full("slow")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "build, options, feature",
    [
        pytest.param(tiny_llama, GREEDY, "greedy", id="greedy"),
        pytest.param(tiny_t5, GREEDY, "greedy", id="greedy-t5"),
        pytest.param(tiny_llama, BEAMS, "beam search", id="beams"),
        pytest.param(tiny_t5, BEAMS, "beam search", id="beams-t5"),
        pytest.param(tiny_llama, SAMPLING, "sampling", id="sampling"),
        pytest.param(tiny_llama, STATIC, "static cache", id="static"),
        pytest.param(tiny_llama, {**GREEDY, "synced_gpus": None}, "greedy", id="greedy-unsaid"),
    ],
)
@pytest.mark.support("generate: {feature}, ranks ending at different lengths", area="Generation")
def test_ranks_that_end_at_different_lengths_get_the_tokens_of_the_plain_model(build, options, feature, stage):
    run_ranks(_generates, 2, build, options, stage)


def _adapted():
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("generate: with an adapter", area="Generation")
def test_an_adapters_model_generates(stage):
    """PEFT hands the call on to the model inside, which must know that it is sharded, too."""
    pytest.importorskip("peft")
    run_ranks(_generates, 2, _adapted, GREEDY, stage)


def _small_llama():
    return tiny_llama(layers=1)


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("generate: assisted by a model or prompt lookup (stage 3: gathered)", area="Generation")
@ranks(2)
def test_assistants_help_where_ranks_need_not_keep_step(stage):
    rank = dist.get_rank()
    model, plain, _ = _sharded_and_plain(tiny_llama, stage)
    assistant, plain_assistant, _ = _sharded_and_plain(_small_llama, stage)
    wanted = _tokens(plain, rank, assistant_model=plain_assistant, **GREEDY)
    assert wanted == _tokens(plain, rank, assistant_model=plain, **GREEDY), "an assistant saves time, changes nothing"
    helped = [{"assistant_model": plain_assistant}, {"prompt_lookup_num_tokens": 2}]
    with hf_zero.gathered(model):
        assert all(_tokens(model, rank, **help, **GREEDY) == wanted for help in helped)
        with hf_zero.gathered(assistant):
            assert _tokens(model, rank, assistant_model=assistant, **GREEDY) == wanted
    for help in helped if stage < 3 else ():
        assert _tokens(model, rank, **help, **GREEDY) == wanted
    for outside in [*helped, {"assistant_model": assistant}] if stage == 3 else ():
        with pytest.raises(
            LifecycleError, match="generate: with an assistant.*generate inside `with hf_zero.gathered"
        ):
            _tokens(model, rank, **outside, **GREEDY)
        with hf_zero.gathered(model), pytest.raises(LifecycleError, match="gather a sharded assistant too"):
            _tokens(model, rank, assistant_model=assistant, **GREEDY)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage, shared_memory", [(1, True), (2, True), (3, True), (3, False)])
@pytest.mark.support("generate inside hf_zero.gathered: any mode, without communication", area="Generation")
@ranks(2)
def test_inside_gathered_one_rank_may_generate_alone(stage, shared_memory):
    """Rank 1 does nothing inside the context: whoever communicates waits for it in vain."""
    rank = dist.get_rank()
    model, plain, engine = _sharded_and_plain(tiny_llama, stage, shared_memory=shared_memory)
    with hf_zero.gathered(model):
        sent = engine.comm.counters.total_sent_nbytes
        for options in (GREEDY, BEAMS, SAMPLING, LOOKUP, STATIC) if rank == 0 else ():
            assert _tokens(model, rank, **options) == _tokens(plain, rank, **options), options
        assert engine.comm.counters.total_sent_nbytes == sent
    assert _tokens(model, rank, **GREEDY) == _tokens(plain, rank, **GREEDY), "afterwards, together as before"
    assert_away(model, engine)


@ranks(2)
def test_generation_between_a_forward_and_its_backward():
    """A sample between two steps, and between a forward and its backward, changes neither."""

    def act(model, rank, step):
        ids = token_ids(rank, step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.generate(input_ids=ids[:, :3], do_sample=False, max_new_tokens=4 + 2 * rank)
        return loss

    assert_like_plain_torch(tiny_llama, act)
