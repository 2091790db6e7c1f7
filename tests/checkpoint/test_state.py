import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import load_state, load_weights, manifest, save_checkpoint
from hf_zero.checkpoint.manifest import MANIFEST_NAME, run_of
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.errors import CheckpointError, LifecycleError
from tests.checkpoint import models
from tests.checkpoint.subjects import (
    assert_shown,
    expected_moment,
    fill,
    optimizer_of,
    part_of,
    resealed,
    run_ranks,
    sharded,
    values_of,
    world_of_one,
)
from tests.compare import weights_of


def save(comm, folder, build=models.tied_llama, stage=3, half=False, stepped=True):
    engine = sharded(build(), stage, half=half)
    optimizer = optimizer_of(engine, stepped=stepped)
    save_checkpoint(engine, optimizer, folder, extra={"step": 12})


def load_and_check(comm, folder, build, stage, half):
    engine, exact = sharded(build(), stage, half=half), build()
    fill(engine, lambda shard: torch.full_like(shard.tensor, -1))
    optimizer = optimizer_of(engine, stepped=False, lr=0.5)
    load_weights(engine, folder)
    manifest = load_state(engine, optimizer, folder)
    assert manifest.extra == {"step": 12} and optimizer.param_groups[0]["lr"] == 0.1
    assert {numbers["step"] for numbers in optimizer.named_scalar_state().values()} == {12.0}
    for key, shard in optimizer.named_state_shards(resident=True):
        assert torch.equal(shard.tensor, part_of(expected_moment(shard.name, shard.shape, key), shard))
    for shard in engine.named_shards(resident=True):
        assert torch.equal(shard.tensor, part_of(exact.get_parameter(shard.name), shard))
    assert_shown(engine, exact)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [((3, 3), (2, 3)), ((2, 0), (3, 1)), ((1, 3), (2, 0))])
def test_state_resumes_at_any_number_of_ranks_and_any_stage(tmp_path, saved_by, loaded_by, half):
    run_ranks(save, saved_by[0], tmp_path, models.tied_llama, saved_by[1], half)
    run_ranks(load_and_check, loaded_by[0], tmp_path, models.tied_llama, loaded_by[1], half)


def save_and_load_adapters(comm, folder):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    engine = sharded(get_peft_model(models.tied_llama(), config), 3)
    save_checkpoint(engine, optimizer_of(engine), folder)
    loaded = sharded(PeftModel.from_pretrained(models.tied_llama(), folder, is_trainable=True), 2)
    optimizer = optimizer_of(loaded, stepped=False)
    load_state(loaded, optimizer, folder)
    found, wanted = weights_of(loaded.model), weights_of(engine.model)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    for key, shard in optimizer.named_state_shards(resident=True):
        assert torch.equal(shard.tensor, part_of(expected_moment(shard.name, shard.shape, key), shard))


def test_adapters_are_saved_with_their_state(tmp_path):
    run_ranks(save_and_load_adapters, 2, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() and not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("build", [models.Plain, models.t5, models.mixtral])
def test_models_of_other_kinds_resume(tmp_path, build):
    """With empty and 0-d parameters, two stacks, and experts that are other tensors in the files."""
    run_ranks(save, 3, tmp_path, build)
    run_ranks(load_and_check, 2, tmp_path, build, 2, False)


def test_state_is_stored_whole_by_parameter_name_in_plain_formats(tmp_path):
    run_ranks(save, 2, tmp_path, models.tied_llama, 2, True)
    assert set(os.listdir(tmp_path / "zero")) == {"master.safetensors", "optimizer.safetensors"}
    exact = dict(models.tied_llama().named_parameters())
    moments = load_file(tmp_path / "zero" / "optimizer.safetensors")
    masters = load_file(tmp_path / "zero" / "master.safetensors")
    assert len(moments) == 2 * len(masters) == 2 * len(exact)
    for name, p in exact.items():
        assert torch.equal(moments[f"{name}.exp_avg"], expected_moment(name, p.shape, "exp_avg").view(p.shape))
        assert torch.equal(masters[name], p)
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    run = manifest["run"]
    assert (manifest["format"], run["stage"], run["num_ranks"]) == (4, 2, 2)
    assert set(manifest["versions"]) == {"hf_zero", "torch"} and run["weight_dtypes"] == ["bfloat16"]
    assert run["scalars"]["model.norm.weight"] == {"step": 12.0}


def test_masters_are_left_out_where_the_weights_hold_them(tmp_path):
    save(world_of_one(), tmp_path, half=True)
    save(world_of_one(), tmp_path)
    assert set(os.listdir(tmp_path / "zero")) == {"optimizer.safetensors"}


def test_an_optimizer_that_has_not_stepped_resumes_as_one(tmp_path):
    save(world_of_one(), tmp_path, stepped=False)
    engine = sharded(models.tied_llama())
    optimizer = optimizer_of(engine)
    load_state(engine, optimizer, tmp_path)
    assert optimizer.named_scalar_state() == {} and not list(optimizer.named_state_shards())


@pytest.fixture
def saved(tmp_path) -> Path:
    save(world_of_one(), tmp_path, half=True)
    return tmp_path


def refused(folder, match, build=models.tied_llama, change=lambda optimizer: None):
    engine = sharded(build(), half=True)
    optimizer, before = optimizer_of(engine), values_of(engine)
    change(optimizer)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_state(engine, optimizer, folder)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(values, before[name]) for name, values in values_of(engine).items())


def test_state_that_is_not_there_or_incomplete_is_refused(saved):
    refused(saved / "absent", r"absent: has no complete optimizer state; resume from another")
    os.truncate(saved / "zero" / "optimizer.safetensors", 5000)
    refused(saved, "optimizer.safetensors: has 5000 bytes, but was saved with")
    (saved / "zero" / "optimizer.safetensors").unlink()
    refused(saved, "optimizer.safetensors: is missing")
    (saved / MANIFEST_NAME).unlink()
    refused(saved, f"{MANIFEST_NAME}: not found: the checkpoint is incomplete; resume from another checkpoint")


def test_a_manifest_of_other_fields_is_one_line(saved, monkeypatch):
    monkeypatch.setattr(manifest, "asdict", lambda run: {"stage": 3})
    resealed(saved)
    refused(saved, f"{MANIFEST_NAME}: cannot be parsed")


def test_a_manifest_of_another_version_is_refused(saved, monkeypatch):
    found = manifest.Manifest.read(saved)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT_VERSION", 9)
        found.write(saved)
    refused(saved, f"{MANIFEST_NAME}: has format 9, but this hf_zero version reads 4; use the version that saved it")


def test_state_of_another_shape_is_named(saved):
    refused(
        saved, r"'model.embed_tokens.weight.exp_avg' has shape \[61, 16\], the model's has \[61, 12\]", narrow_llama
    )


def narrow_llama():
    config = models.tied_llama().config
    config.hidden_size = 12
    return type(models.tied_llama())(config)


def test_state_of_another_optimizer_is_named_either_way(saved):
    renaming = partial(with_keys, {"exp_avg": "max_exp_avg"})
    refused(saved, "tensor '.*max_exp_avg' is missing", change=renaming)
    dropping = partial(with_keys, {"exp_avg": "exp_avg"})
    refused(saved, r"unexpected state .*exp_avg_sq.* and \d+ more; resume with the optimizer", change=dropping)


def with_keys(names: dict[str, str], optimizer) -> None:
    """Makes it have these states alone, under other names."""
    shards = optimizer.named_state_shards
    optimizer.named_state_shards = lambda *args, **kwargs: (
        (names[key], shard) for key, shard in shards(*args, **kwargs) if key in names
    )


def test_a_value_that_json_does_not_know_is_refused_and_nothing_is_left(tmp_path):
    engine = sharded(models.tied_llama())
    with pytest.raises(CheckpointError, match="cannot be written .*; use only numbers, strings, lists and dicts"):
        save_checkpoint(engine, optimizer_of(engine), tmp_path / "saved", extra={"rng": torch.zeros(1)})
    assert os.listdir(tmp_path) == []


def test_state_is_not_saved_after_a_load_that_broke_off(saved, monkeypatch):
    engine = sharded(models.tied_llama())
    optimizer = optimizer_of(engine)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="gone"):
        patch.setattr(OpenFiles, "read_range", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        load_weights(engine, saved)
    before = run_of(saved)
    with pytest.raises(LifecycleError, match="loading the weights of .* broke off"):
        save_checkpoint(engine, optimizer, saved)
    assert run_of(saved) == before
    load_weights(engine, saved)
    save_checkpoint(engine, optimizer, saved)
