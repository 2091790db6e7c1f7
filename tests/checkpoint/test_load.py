import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_zero
from hf_zero.checkpoint import check_pretrained, load_pretrained, load_weights
from hf_zero.checkpoint.save import save_pretrained
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.subjects import assert_shown, part_of, run_ranks, sharded, values_of, world_of_one
from tests.distributed import ranks


def blank(build):
    """The model with all its state overwritten."""
    model = build()
    for tensor in model.state_dict().values():
        tensor.fill_(-1) if tensor.numel() else None
    return model


def load_and_check(comm, folder, build, stage):
    engine, reference = sharded(blank(build), stage), build()
    load_weights(engine, folder)
    for shard in engine.named_shards(resident=True):
        assert torch.equal(shard.tensor, part_of(reference.get_parameter(shard.name), shard))
    assert_shown(engine, reference)
    for (name, buffer), expected in zip(engine.model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, expected) or name == "scratch", name


@pytest.mark.quick
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("build", [models.tied_llama, models.Plain])
def test_every_rank_gets_its_ranges_and_all_buffers(tmp_path, build, stage):
    save_pretrained(sharded(build()), tmp_path, max_shard_size="5KB")
    run_ranks(load_and_check, 3, tmp_path, build, stage)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.bert, models.t5])
def test_folders_that_transformers_saved_are_loaded(tmp_path, build):
    build().save_pretrained(tmp_path, max_shard_size="5KB")
    load_and_check(world_of_one(), tmp_path, build, 3)


def test_a_tied_tensor_may_be_stored_under_any_of_its_names_or_under_all(tmp_path):
    models.tied_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    load_and_check(world_of_one(), tmp_path, models.tied_llama, 3)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path)
    load_and_check(world_of_one(), tmp_path, models.tied_llama, 3)


@pytest.fixture
def saved(tmp_path):
    models.llama().save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def refused(folder, match):
    """Loading is refused with one line, before the first value is written."""
    engine = sharded(blank(models.llama))
    with pytest.raises(CheckpointError, match=match) as caught:
        load_weights(engine, folder)
    assert "\n" not in str(caught.value)
    assert all(bool((values == -1).all()) for values in values_of(engine).values())


@pytest.mark.parametrize(
    ("dropped", "added", "match"),
    [
        ("lm_head.weight", {}, r"1 tensors of the model are missing \(lm_head.weight\); pass a folder"),
        ("", {"stranger": torch.zeros(1)}, r"1 are unexpected \(stranger\); pass a folder"),
        (
            "",
            {"lm_head.weight": torch.zeros(61, 8)},
            r"tensor 'lm_head.weight' has shape \[61, 8\], the model's has \[61, 16\]; load with the con",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_tensor_that_does_not_fit_is_named(saved, dropped, added, match):
    save_file({name: each for name, each in (load_file(saved) | added).items() if name != dropped}, saved)
    refused(saved.parent, match)


def test_a_truncated_file_and_a_missing_folder_are_refused(saved):
    os.truncate(saved, os.path.getsize(saved) - 100)
    refused(saved.parent, "model.safetensors: truncated, damaged, or")
    refused(saved.parent / "absent", "absent: no such folder")


def test_tensors_that_the_class_declares_obsolete_are_passed_over(saved):
    save_file(load_file(saved) | {"layers.0.inv_freq": torch.zeros(1)}, saved)
    engine = sharded(blank(models.llama))
    engine.model._keys_to_ignore_on_load_unexpected = {r"\.inv_freq$"}
    load_weights(engine, saved.parent)


@ranks(2)
def test_a_rank_that_cannot_read_fails_all(saved):
    comm, folder = world_of_one(), saved.parent
    engine = sharded(blank(models.llama))
    seen = folder if comm.rank == 0 else folder / "absent"
    with pytest.raises(CheckpointError) as caught:
        load_weights(engine, seen)
    assert "no such folder" in str(caught.value)


def test_a_pretrained_model_is_loaded_with_its_arguments(saved):
    model = load_pretrained(AutoModelForCausalLM, saved.parent, dtype=torch.bfloat16)
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16
    nested = load_pretrained(AutoModelForCausalLM, saved.parent.parent, subfolder=saved.parent.name)
    assert torch.equal(hf_zero.materialize(nested).lm_head.weight, models.llama().lm_head.weight)


class Unreachable:
    """Stands for a class whose model must not even be begun."""

    @staticmethod
    def from_pretrained(*args, **kwargs):
        raise AssertionError("the files were not checked before the model was built")


@pytest.mark.parametrize("name", ["/absent/model", "./absent", "../absent", "~/absent/model"])
def test_a_folder_that_is_not_there_is_refused_before_the_model_is_built(name):
    with pytest.raises(CheckpointError, match="absent.*: does not exist; pass the folder of a saved model, or a name"):
        load_pretrained(Unreachable, name)


def test_damaged_folders_are_refused_before_the_model_is_built(saved):
    with pytest.raises(CheckpointError, match="model.safetensors: is a file; pass the folder of a saved model"):
        load_pretrained(Unreachable, saved)
    with pytest.raises(CheckpointError, match="absent: does not exist"):
        load_pretrained(Unreachable, saved.parent, subfolder="absent")
    os.truncate(saved, os.path.getsize(saved) - 1)
    with pytest.raises(CheckpointError, match="model.safetensors: truncated, damaged, or"):
        load_pretrained(Unreachable, saved.parent)
    saved.unlink()
    with pytest.raises(CheckpointError, match="found neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(Unreachable, saved.parent)
    (saved.parent / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_pretrained(Unreachable, saved.parent)


def test_a_truncated_variant_is_refused(saved):
    saved.rename(saved.parent / "model.fp16.safetensors")
    check_pretrained(saved.parent, variant="fp16")
    os.truncate(saved.parent / "model.fp16.safetensors", 50)
    with pytest.raises(CheckpointError, match="model.fp16.safetensors: truncated, damaged, or"):
        check_pretrained(saved.parent, variant="fp16")


def test_weights_in_other_formats_are_left_to_transformers(saved):
    saved.unlink()
    (saved.parent / "pytorch_model.bin").write_bytes(b"")
    check_pretrained(saved.parent)


def test_a_config_that_is_cut_off_is_one_line(saved):
    (saved.parent / "config.json").write_text(json.dumps({"model_type": "llama"})[:-3])
    with pytest.raises(CheckpointError, match="config.json: cannot be read .*; copy or download it again"):
        load_pretrained(AutoModelForCausalLM, saved.parent)


def test_what_transformers_finds_wrong_becomes_one_line(saved):
    saved.unlink()
    (saved.parent / "model.gguf").touch()  # of no format that it finds by itself
    with pytest.raises(CheckpointError, match="the model cannot be loaded .*; check the name") as caught:
        load_pretrained(AutoModelForCausalLM, saved.parent)
    assert "\n" not in str(caught.value)
