"""Deep models are predicted from a few of their blocks, to the byte."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hf_zero.activation import vocabulary_ranges
from hf_zero.planner import prediction, simulated_step
from hf_zero.planner.prediction import alike_blocks
from hf_zero.planner.topology import Cluster, device_named
from tests.planner import subjects
from tests.planner.subjects import predict


NUM_BLOCKS = 13
# So slow between its devices that these tiny models wait for their exchanges.
CLUSTER = Cluster(replace(device_named("h100"), latency_us=1), 1, 8)


def _deep(name: str):
    subject = {"llama": subjects.llama, "t5": subjects.t5}[name]
    with torch.device("meta"):
        model = subject().train()
        model.config.use_cache = False
        if name == "llama":
            model.model.layers.extend(subjects.llama().model.layers[0] for _ in range(NUM_BLOCKS - subjects.LAYERS))
            model.config.num_hidden_layers = NUM_BLOCKS
    return model


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 0},
        {"stage": 3, "gradient_checkpointing": True, "prefetch_units": 2},
        {"stage": 2, "offload": "optimizer", "compute_dtype": torch.bfloat16},
    ],
    ids=["stage-0", "stage-3", "offload"],
)
def test_what_is_extended_is_what_the_whole_model_takes(settings, monkeypatch):
    model = _deep("llama")

    def predicted():
        return predict(model, num_ranks=8, batch=subjects.batch("llama"), cluster=CLUSTER, **settings)

    extended = predicted()
    monkeypatch.setattr(prediction, "MAX_WHOLE", 1000)
    whole = predicted()
    assert extended.num_parameters == whole.num_parameters
    assert extended.classes == whole.classes
    assert extended.step == whole.step
    assert extended.time.flops == whole.time.flops and extended.time.model_flops == whole.time.model_flops
    assert extended.time.busy_ns == pytest.approx(whole.time.busy_ns, rel=0.001)
    assert extended.time.step_seconds() == pytest.approx(whole.time.step_seconds(), rel=0.01)


def test_equal_ranges_and_tiles_are_counted_and_not_repeated(monkeypatch):
    """A chunked loss in nine ranges of the vocabulary, and MLPs over eight tiles."""
    monkeypatch.setattr("hf_zero.activation.chunked_loss.MIN_WIDTH", 1)
    monkeypatch.setattr("hf_zero.activation.chunked_loss.ACCELERATOR_NBYTES", 60 * 4 * subjects.ROWS * subjects.LENGTH)
    starts: set[int] = set()
    place_in = vocabulary_ranges._place_in
    monkeypatch.setattr(vocabulary_ranges, "_place_in", lambda *args: starts.add(args[1].start) or place_in(*args))

    def predicted():
        settings = {"compute_dtype": torch.bfloat16, "chunked_loss": "on", "tiled_mlp": 8, "cluster": CLUSTER}
        starts.clear()
        return predict(subjects.llama(), num_ranks=8, batch=subjects.batch("llama"), **settings)

    few = predicted()
    assert len(starts) == 4
    monkeypatch.setattr(simulated_step, "few_parts", nullcontext)
    assert few == predicted() and len(starts) == 9


def test_only_blocks_that_are_alike_are_left_out():
    assert alike_blocks(_deep("llama")) == "model.layers"
    assert alike_blocks(_deep("t5")) is None  # two stacks
    model = _deep("llama")
    model.model.layers[3].mlp.up_proj.weight.requires_grad_(False)
    assert alike_blocks(model) is None


def test_embedding_and_head_take_turns_in_one_buffer_where_they_are_large(monkeypatch):
    def buffers() -> list[int]:
        found = predict(_deep("llama"), num_ranks=8, stage=3).classes
        return [each.nbytes for each in found if each.name.startswith(("gather buffers", "gradient buffers"))]

    model = _deep("llama")
    numel = model.lm_head.weight.numel()
    whole = buffers()
    monkeypatch.setattr("hf_zero.engine.partition.VOCABULARY_NUMEL", numel)
    apart = buffers()
    # in fp32, but for what is rounded up to ranges of the ranks and multiples of 16 elements; both are smaller than a
    # block here, so their gradients are collected where the blocks' are
    assert [a - b for a, b in zip(whole, apart)] == pytest.approx([4 * numel, 2 * 4 * numel], abs=3 * 4 * 16 * 8)
    assert alike_blocks(model) == "model.layers"
