import pytest
import torch

from hf_zero.checkpoint.conversion import file_tensors
from hf_zero.checkpoint.names import renamed, saved_tensors, shortened
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.fakes import FakeEngine, world_of_one


pytestmark = pytest.mark.quick


def tensors_of(model):
    return saved_tensors(model, FakeEngine(model, world_of_one()).param_infos())


@pytest.mark.parametrize(
    ("build", "dropped"),
    [
        (models.llama, set()),
        (models.tied_llama, {"lm_head.weight"}),
        (models.gpt2, {"lm_head.weight"}),
        (models.t5, {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}),
        (models.bert, {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}),
    ],
)
def test_tied_tensors_appear_once_under_the_name_that_transformers_keeps(build, dropped):
    model = build()
    expected = [name for name in model.state_dict() if name not in dropped]
    assert [saved.key for saved in tensors_of(model)] == expected


def test_a_declared_source_wins_over_an_earlier_name():
    model = models.Plain()
    model.all_tied_weights_keys = {"first.weight": "again.weight"}
    (tied,) = (saved for saved in tensors_of(model) if len(saved.aliases) > 1)
    assert (tied.name, tied.key, tied.aliases) == ("first.weight", "again.weight", ("first.weight", "again.weight"))


def test_buffers_are_listed_when_the_model_persists_them():
    buffers = {saved.key: saved for saved in tensors_of(models.Plain()) if saved.buffer is not None}
    assert set(buffers) == {"steps", "columns", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert buffers["steps"].dtype == torch.int64 and buffers["steps"].shape == ()


def test_keys_that_the_model_leaves_out_are_left_out():
    model = models.Plain()
    model._keys_to_ignore_on_save = {"scale", "norm.running_var"}
    names = {saved.key for saved in tensors_of(model)}
    assert not names & model._keys_to_ignore_on_save and "norm.running_mean" in names


def test_renaming_keeps_only_what_is_named():
    (only,) = renamed(tensors_of(models.Plain()), {"scale": "adapter.scale"})
    assert (only.name, only.key, only.shape) == ("scale", "adapter.scale", ())


def test_two_tensors_under_one_name_are_refused():
    tensors = renamed(tensors_of(models.Plain()), {"scale": "same", "first.bias": "same"})
    with pytest.raises(CheckpointError, match="tensor 'same' appears twice; use a unique name"):
        file_tensors(None, tensors)


def test_long_lists_are_shortened():
    assert shortened(["a", "b"]) == "a, b"
    assert shortened("abcdefgh") == "a, b, c, d, e and 3 more"
