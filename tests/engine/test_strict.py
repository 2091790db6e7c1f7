"""One process that behaves as one of several at its stage: what only sharded parameters show needs no launcher."""

import os

import pytest
import torch

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, LifecycleError
from tests import models
from tests.distributed import ranks
from tests.engine import (
    test_autograd,
    test_casting,
    test_failures,
    test_frozen,
    test_gathered,
    test_placeholder,
    test_user_hooks,
)
from tests.training import Sharded, adamw, assert_equal, train


# Tests whose bodies say nothing about how many ranks there are.
BODIES = [
    test_placeholder.test_parameters_keep_identity_shape_dtype_and_device,
    test_placeholder.test_any_read_raises_with_the_parameters_name,
    test_placeholder.test_any_write_raises_with_the_parameters_name,
    test_placeholder.test_state_dict_outside_of_gathered_raises,
    test_placeholder.test_deepcopy_and_pickle_are_refused,
    test_gathered.test_modules_and_parameters_are_whole_inside,
    test_gathered.test_training_goes_on_from_what_was_written,
    test_gathered.test_writeback_updates_the_masters_of_what_was_written,
    test_gathered.test_contexts_may_be_nested,
    test_autograd.test_gradients_taken_by_autograd_grad_are_not_stepped_with,
    test_failures.test_parameters_are_whole_after_a_failure,
    test_failures.test_a_backward_that_fails_on_all_ranks_is_in_no_step,
    test_frozen.test_parameters_used_now_and_then_are_left_alone_in_between,
    test_user_hooks.test_full_backward_hooks_see_and_change_the_gradients,
    test_casting.test_a_model_seen_in_bf16_computes_what_a_cast_one_does_and_keeps_its_masters,
    test_casting.test_moving_or_casting_a_sharded_model_is_refused_and_changes_nothing,
]


@pytest.mark.full("more cases", after=4)
@pytest.mark.parametrize("test", BODIES, ids=lambda test: test.__name__)
@ranks(1)
def test_one_strict_process_is_as_one_of_several(test):
    os.environ["HF_ZERO_STRICT"] = "1"
    try:
        test.body()
    finally:
        del os.environ["HF_ZERO_STRICT"]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(1)
def test_a_strict_process_computes_the_same_bits(dtype):
    settings = {"compute_dtype": dtype} if dtype else {}
    wanted = train(Sharded(models.build("llama-tied"), adamw, 0, **settings), "llama-tied")
    for stage in (1, 2, 3):
        subject = Sharded(models.build("llama-tied"), adamw, stage, strict=True, **settings)
        assert subject.engine.root.is_sharded == (stage == 3)
        assert_equal(train(subject, "llama-tied"), wanted, f"strict stage {stage} and one process")


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
