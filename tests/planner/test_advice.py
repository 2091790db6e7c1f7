"""Which settings fit: the cheapest of them, with its reason."""

from dataclasses import replace

import pytest
import torch

from hf_zero.config import ZeroConfig
from hf_zero.planner import Prediction, advise
from hf_zero.planner.advice import USABLE_SHARE, WAYS
from hf_zero.planner.simulated_step import StepMemory


# by stage and offload, what the step takes without checkpointing
PEAKS = {way: 1000 - 100 * index for index, way in enumerate(WAYS)}


def _predict(config: ZeroConfig, checkpointing: bool) -> Prediction:
    peak = PEAKS[config.stage, config.offload] - (50 if checkpointing else 0)
    step = StepMemory(
        peak - 200, 0, {"update": peak}, activation_nbytes=100, head_nbytes=50, sent_nbytes=1, copied_nbytes=0
    )
    return Prediction(config, 2, checkpointing, 10, 10, classes=[], checkpoint_nbytes=0, step=step)


def _advise(memory: float, config: ZeroConfig | None = None, **kwargs):
    return advise(_predict, config or ZeroConfig(), int(memory / USABLE_SHARE) + 1, **kwargs)


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


def test_what_fits_nowhere_is_said_with_what_it_needs():
    advice = _advise(100)
    assert advice.best is None
    assert "nothing fits" in advice.render() and "use more ranks" in advice.render()


def test_all_ways_are_tried_and_other_settings_kept():
    given = ZeroConfig(stage=1, compute_dtype=torch.bfloat16, offload="optimizer", offload_dir="/nvme")
    advice = _advise(1000, given)
    tried = [(each.config.stage, each.config.offload, each.gradient_checkpointing) for each in advice.predictions]
    assert tried == [(*way, switch) for switch in (False, True) for way in WAYS]
    for each in advice.predictions:
        assert each.config.compute_dtype is torch.bfloat16
        assert each.config.offload_dir == (None if each.config.offload == "none" else "/nvme")


def test_checkpointing_that_is_asked_for_is_in_every_way():
    advice = _advise(1000, gradient_checkpointing=True)
    assert all(each.gradient_checkpointing for each in advice.predictions)
    activations = replace(ZeroConfig(), offload_activations=True)
    switches = [each.gradient_checkpointing for each in _advise(1000, activations).predictions]
    assert sum(switches) == len(switches) / 2  # either way there are activations to offload
