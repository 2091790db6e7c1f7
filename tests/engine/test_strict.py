"""One process that behaves as one of several at its stage: what only sharded parameters show needs no launcher."""

import os
from importlib import import_module

import pytest
import torch

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, LifecycleError
from tests import models
from tests.distributed import run_ranks
from tests.training import Sharded, adamw, assert_equal, train


LIMIT = 120.0

# The bodies of other tests that say nothing about how many ranks there are.
BODIES = {
    "test_placeholder": [
        "_keeps_identity",
        "_reads_raise",
        "_uses_little_memory",
        "_state_dict_raises",
        "_copies_refused",
    ],
    "test_gathered": ["_what_can_be_gathered", "_writeback_then_train", "_without_writeback", "_masters", "_nested"],
    "test_writes": ["_assigned_while_away"],
    "test_autograd": ["_autograd_grad_is_not_collected"],
    "test_failures": ["_forgets_partial_gradients", "_step_after_failed_backward", "_gathered_after_failure"],
    "test_frozen": ["_input_gradients", "_all_frozen", "_sometimes_used", "_alternating_blocks"],
    "test_user_hooks": ["_tensor_hooks", "_accumulate_hooks", "_replacing_hooks", "_reads_own_parameters"],
    "test_reuse": ["_changing_order", "_prefetching"],
    "test_casting": ["_seen_in_bf16", "_no_casts"],
}


def _strictly(bodies: dict[str, list[str]]):
    """Runs bodies of other tests in this one rank, every engine in them being strict."""
    os.environ["HF_ZERO_STRICT"] = "1"
    try:
        for module, names in bodies.items():
            for name in names:
                torch.manual_seed(1234)
                getattr(import_module(f"tests.engine.{module}"), name)()
    finally:
        del os.environ["HF_ZERO_STRICT"]


@pytest.mark.full("more cases", after=4)
@pytest.mark.parametrize("module", BODIES)
def test_one_strict_process_is_as_one_of_several(module):
    run_ranks(_strictly, 1, {module: BODIES[module]}, timeout=LIMIT)


def _same_bits(name, dtype):
    settings = {"compute_dtype": dtype} if dtype else {}
    wanted = train(Sharded(models.build(name), adamw, 0, **settings), name)
    for stage in (1, 2, 3):
        subject = Sharded(models.build(name), adamw, stage, strict=True, **settings)
        assert subject.engine.root.is_sharded == (stage == 3)
        assert_equal(train(subject, name), wanted, f"strict stage {stage} and one process")


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_strict_process_computes_the_same_bits(dtype):
    run_ranks(_same_bits, 1, "llama-tied", dtype, timeout=LIMIT)


def test_strict_is_what_the_environment_says(monkeypatch):
    assert not ZeroConfig().strict
    monkeypatch.setenv("HF_ZERO_STRICT", "1")
    assert ZeroConfig().strict and not ZeroConfig(strict=False).strict
    monkeypatch.setenv("HF_ZERO_STRICT", "0")
    assert not ZeroConfig().strict
    monkeypatch.setenv("HF_ZERO_STRICT", "yes")
    with pytest.raises(ConfigError, match="HF_ZERO_STRICT"):
        ZeroConfig()


def test_a_read_outside_of_a_forward_is_refused_in_one_strict_process():
    model = torch.nn.Linear(4, 4)
    hf_zero.shard(model, stage=3, strict=True)
    with pytest.raises(LifecycleError, match="^weight: is used"):
        model.weight.isnan()
    with hf_zero.gathered(model):
        assert not model.weight.isnan().any()
