"""Which settings fit: the cheapest of them, with its reason."""

import shlex

import pytest
import torch
from transformers import HfArgumentParser

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner import Prediction, compare, longest_sequence, remedy
from hf_zero.planner.search import GIB, USABLE_SHARE, WAYS, flags_of
from hf_zero.planner.simulated_step import StepMemory
from hf_zero.recipes.plan import Arguments


# by stage and offload, what the step takes without checkpointing
PEAKS = {way: 1000 - 100 * index for index, way in enumerate(WAYS)}


def _made(config: ZeroConfig, checkpointing: bool, states: int, activations: int, logits: int = 0) -> Prediction:
    """At the peak there are states and the larger of the others."""
    moments = {"head": states + logits, "update": states + activations}
    sizes = {"activation_nbytes": activations, "head_nbytes": logits, "sent_nbytes": 1, "copied_nbytes": 0}
    step = StepMemory(states, states, 0, moments, **sizes)
    return Prediction(config, 8, checkpointing, 10, 10, classes=[], checkpoint_nbytes=0, step=step)


def _predict(config: ZeroConfig, checkpointing: bool) -> Prediction:
    peak = PEAKS[config.stage, config.offload] - (50 if checkpointing else 0)
    return _made(config, checkpointing, peak - 200, 200)


def _advise(memory: float, config: ZeroConfig | None = None, **kwargs):
    memory_nbytes = int(memory / USABLE_SHARE) + 1
    return compare(lambda *way: [_predict(*way)], config or ZeroConfig(), memory_nbytes, **kwargs)


@pytest.mark.quick
@pytest.mark.parametrize(
    "memory, stage, offload, checkpointing",
    [
        (1000, 0, "none", False),
        (999, 1, "none", False),
        (700, 3, "none", False),
        (699, 2, "optimizer", False),
        (400, 3, "params", False),
        (360, 3, "params", True),
    ],
)
def test_the_cheapest_way_that_fits_is_advised(memory, stage, offload, checkpointing):
    best = _advise(memory).best
    assert (best.config.stage, best.config.offload, best.gradient_checkpointing) == (stage, offload, checkpointing)
    assert f"recommended: --zero_stage {stage}" in _advise(memory).render()


def test_what_fits_nowhere_is_said_with_what_it_needs_unless_more_flags_help():
    advice = _advise(100)
    assert advice.best is None
    assert "nothing fits" in advice.render() and "use more ranks" in advice.render()
    text = _advise(700).render("it fits with another flag")
    assert text.endswith("\nit fits with another flag") and "recommended" not in text and "<-" not in text
    assert "nothing fits" not in _advise(100).render("it fits with another flag")


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags",
    [
        "--zero_stage 3 --gradient_checkpointing",
        "--zero_stage 3 --zero_reduce_dtype int8 --zero_gather_dtype int8 --zero_shard_size 2",
        "--zero_stage 3 --zero_bucket_mb 16 --zero_prefetch_units 2 --zero_keep_gathered auto "
        "--zero_shared_memory False --zero_nonfinite skip",
        "--zero_stage 2 --zero_offload optimizer --zero_offload_fraction 0.5 --zero_offload_dir '/my nvme'",
        "--zero_stage 2 --zero_offload optimizer --zero_chunked_loss off",
        "--zero_stage 3 --zero_partition_activations --gradient_checkpointing",
        "--zero_stage 3 --zero_offload_activations --zero_tiled_mlp auto --zero_sequence_parallel 2",
    ],
)
def test_the_flags_of_a_run_are_all_those_that_it_was_given(flags):
    def read(argv: list[str]):
        (found,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
        return found

    asked = read(shlex.split(flags))
    prediction = _of_parts(asked.zero_config(), asked.gradient_checkpointing)
    assert read(shlex.split(flags_of(prediction))) == asked
    assert len(shlex.split(flags_of(prediction))) <= len(shlex.split(flags))


def test_all_ways_are_tried_and_other_settings_kept():
    given = ZeroConfig(stage=1, compute_dtype=torch.bfloat16, offload="optimizer", offload_dir="/nvme")
    advice = _advise(1000, given)
    tried = [(each.config.stage, each.config.offload, each.gradient_checkpointing) for each in advice.rows]
    assert tried == [(*way, switch) for switch in (False, True) for way in WAYS]
    for each in advice.rows:
        assert each.config.compute_dtype is torch.bfloat16
        assert each.config.offload_dir == (None if each.config.offload == "none" else "/nvme")
    checkpointed = _advise(1000, gradient_checkpointing=True).rows
    assert all(each.gradient_checkpointing for each in checkpointed)


# Which flags make a run fit


def _of_parts(config: ZeroConfig, checkpointing: bool) -> Prediction:
    """Eight ranks with model states of 24 GiB at stage 0, activations of 40 and logits of 6, which flags make less."""
    states = 24 * GIB // (config.stage + 1) // (4 if config.offload != "none" else 1)
    activations = 40 * GIB // config.sequence_parallel
    activations //= 8 if checkpointing else 1
    activations //= 2 if config.offload_activations else 1
    return _made(config, checkpointing, states, activations, (6 if config.chunked_loss == "off" else 1) * GIB)


@pytest.mark.quick
@pytest.mark.parametrize(
    "gib, settings, checkpointing, flags",
    [
        (46, {}, False, None),
        (50, {"stage": 1}, False, "--zero_stage 2"),
        (11.5, {}, True, "--zero_chunked_loss auto"),
        (15, {}, False, "--gradient_checkpointing"),
        (11, {}, False, "--zero_chunked_loss auto --gradient_checkpointing"),
        (7.3, {"chunked_loss": "on"}, True, "--zero_offload_activations --zero_sequence_parallel 2"),
        (4, {"chunked_loss": "on"}, True, "--zero_offload_activations --zero_offload optimizer"),
    ],
)
def test_the_flags_that_make_a_run_fit_are_the_cheapest_and_none_too_many(gib, settings, checkpointing, flags):
    asked = _of_parts(ZeroConfig(**settings), checkpointing)
    found = remedy(_of_parts, asked, int(gib * GIB / USABLE_SHARE) + 1)
    if flags is None:
        assert found is None
        return
    text = found.render()
    assert f"it fits with {flags}: " in text and found.after.needed_nbytes <= gib * GIB
    assert text.startswith("it does not fit: it needs ")
    assert f"and tensors may take {gib:.1f} GiB; " in text
    assert "activations take" in text and "logits take" in text and "model states take" in text


def test_where_no_flag_helps_that_is_said():
    asked = _of_parts(ZeroConfig(), True)
    text = remedy(_of_parts, asked, GIB // 2).render()
    assert "nothing fits: with --zero_chunked_loss auto" in text and "use more ranks, shorter sequences" in text


def test_flags_that_a_run_refuses_are_not_named():
    asked = _of_parts(ZeroConfig(), False)

    def refuse(config: ZeroConfig, checkpointing: bool) -> Prediction:
        if checkpointing:
            raise UnsupportedError("no switch")
        return _of_parts(config, checkpointing)

    memory = int(15 * GIB / USABLE_SHARE) + 1
    found = remedy(refuse, asked, memory)
    assert "checkpointing" not in found.render() and found.fits

    def predict(config: ZeroConfig, checkpointing: bool) -> Prediction:
        if config.offload != "none":
            raise UnsupportedError("seen in a step alone")
        return _of_parts(config, checkpointing)

    found = remedy(predict, asked, int(2 * GIB / USABLE_SHARE))
    assert not found.fits and found.after.needed_nbytes < asked.needed_nbytes
    assert "--zero_sequence_parallel 8 it takes" in found.render() and "--zero_offload " not in found.render()

    def predict_all_at_once(config: ZeroConfig, checkpointing: bool) -> Prediction:
        if config.tiled_mlp != 1:  # an early flag
            raise UnsupportedError("seen in a step alone")
        return _of_parts(config, checkpointing)

    found = remedy(predict_all_at_once, asked, memory)
    assert found.fits and "it fits with --gradient_checkpointing: " in found.render()


# The longest sequence


@pytest.mark.quick
@pytest.mark.parametrize(
    "mib, positions, tokens, limit",
    [
        (8.5, None, 1280, "of the 8.5 MiB that tensors may take, and 1344 tokens do not fit"),
        (9, 100_000, 1536, "and 1600 tokens do not fit"),  # another slope from 1024
        (9, 1000, 960, "has no more positions"),
        (9, 50, 50, "has no more positions"),
        (7.1, None, 64, "and 128 tokens do not fit"),
    ],
)
def test_the_longest_sequence_that_fits_is_found_with_what_limits_it(mib, positions, tokens, limit):
    asked = []

    def predict(num_tokens: int) -> Prediction:
        asked.append(num_tokens)
        needed = int(2**20 * (7 + max(num_tokens, 2 * num_tokens - 1024) / 1024))
        return _made(ZeroConfig(), False, 0, needed)

    found = longest_sequence(predict, int(mib * 2**20 / USABLE_SHARE) + 1, positions)
    assert found.num_tokens == tokens and found.prediction.needed_nbytes <= mib * 2**20
    assert found.more is None or predict(tokens + 64) == found.more
    assert found.render().startswith(f"max_length auto: {tokens} tokens take ") and limit in found.render()
    assert len(asked) == len({*asked}) + (found.more is not None) < 16
    with pytest.raises(
        ConfigError, match="max_length auto: .* tokens take .*, and tensors may take 6.0 MiB; use more"
    ):
        longest_sequence(predict, int(6 * 2**20 / USABLE_SHARE) + 1, positions)
