import pytest

from hf_zero.checkpoint.conversion import file_tensors
from hf_zero.checkpoint.names import renamed, saved_tensors, shortened
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.subjects import sharded


pytestmark = pytest.mark.quick


def tensors_of(model):
    return saved_tensors(model, sharded(model).param_infos())


def test_a_declared_source_wins_over_an_earlier_name():
    model = models.Plain()
    model.all_tied_weights_keys = {"first.weight": "again.weight"}
    (tied,) = (saved for saved in tensors_of(model) if len(saved.aliases) > 1)
    assert (tied.name, tied.key, tied.aliases) == ("first.weight", "again.weight", ("first.weight", "again.weight"))


def test_keys_that_the_model_leaves_out_are_left_out():
    model = models.Plain()
    model._keys_to_ignore_on_save = {"scale", "norm.running_var"}
    names = {saved.key for saved in tensors_of(model)}
    assert not names & model._keys_to_ignore_on_save and "norm.running_mean" in names


def test_two_tensors_under_one_name_are_refused():
    tensors = renamed(tensors_of(models.Plain()), {"scale": "same", "first.bias": "same"})
    with pytest.raises(CheckpointError, match="tensor 'same' appears twice; use a unique name"):
        file_tensors(None, tensors)


def test_long_lists_are_shortened():
    assert shortened(["a", "b"]) == "a, b"
    assert shortened("abcdefgh") == "a, b, c, d, e and 3 more"
