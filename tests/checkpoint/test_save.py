import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_zero
from benchmarks.counters import reset_resident_peak, resident_peak_nbytes
from hf_zero.checkpoint import staging
from hf_zero.checkpoint.adapters import load_model, lost_beside_adapters
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.checkpoint.save import save_pretrained
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, LifecycleError
from tests.checkpoint import models
from tests.checkpoint.subjects import run_ranks, sharded, world_of_one
from tests.distributed import ranks
from tests.distributed import run_ranks as run_processes


def content_of(folder: Path) -> dict[str, bytes]:
    """All but the manifest, whose tests are in test_manifest."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME}


def save_model(comm, folder, build, name="ours", max_shard_size="50GB", half=False):
    save_pretrained(sharded(build(), half=half), folder / name, max_shard_size=max_shard_size)


@pytest.mark.quick
@pytest.mark.parametrize("build", [models.llama, models.tied_llama, models.gpt2, models.t5, models.bert])
@pytest.mark.parametrize("max_shard_size", ["50GB", "5KB"])
def test_the_folder_is_byte_for_byte_what_transformers_saves(tmp_path, build, max_shard_size):
    save_model(world_of_one(), tmp_path, build, max_shard_size=max_shard_size)
    build().save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    assert content_of(tmp_path / "ours") == content_of(tmp_path / "theirs")


@pytest.mark.quick
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks_write_the_same_files_as_one(tmp_path, num_ranks):
    run_ranks(save_model, num_ranks, tmp_path, models.tied_llama, "ours", "5KB")
    models.tied_llama().save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    assert content_of(tmp_path / "ours") == content_of(tmp_path / "theirs")


def test_a_plain_module_is_saved_as_weights_alone(tmp_path):
    run_ranks(save_model, 3, tmp_path, models.Plain)
    assert set(content_of(tmp_path / "ours")) == {"model.safetensors"}
    expected = {name: tensor for name, tensor in models.Plain().state_dict().items() if name != "again.weight"}
    loaded = load_file(tmp_path / "ours" / "model.safetensors")
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_master_values_are_rounded_to_the_dtype_in_which_they_are_saved(tmp_path):
    save_model(world_of_one(), tmp_path, models.llama, half=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.dtype == torch.bfloat16
    expected = models.llama().bfloat16().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_saving_leaves_the_running_models_config_alone(tmp_path):
    engine = sharded(models.llama(), half=True)
    before = engine.model.config.to_dict()
    save_pretrained(engine, tmp_path / "ours")
    assert engine.model.config.to_dict() == before


def loads_as(folder: Path) -> str:
    """Which of the two models a folder holds: all of "old", all of "new", or none that loads."""
    try:
        weights = AutoModelForCausalLM.from_pretrained(folder).state_dict().values()
    except OSError:
        return "none"
    kinds = {"new" if bool((weight == 1).all()) else "old" for weight in weights}
    assert len(kinds) == 1, "the folder mixes old and new weights"
    return kinds.pop()


def ones():
    model = models.llama()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0)
    return model


def zeros():
    model = models.llama()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("old_size", "new_size", "has_gap"),
    [
        ("50GB", "50GB", False),
        ("50GB", "5KB", False),
        ("5KB", "50GB", False),
        ("5KB", "9KB", False),
        ("9KB", "5KB", False),
        ("5KB", "5KB", True),
    ],
)
def test_at_no_moment_does_the_folder_mix_old_and_new_weights(tmp_path, monkeypatch, old_size, new_size, has_gap):
    """In the end no file of the old ones is left, and those that are not weights stay."""
    save_model(world_of_one(), tmp_path, ones, "fresh", max_shard_size=new_size)
    save_model(world_of_one(), tmp_path, zeros, max_shard_size=old_size)
    (tmp_path / "ours" / "notes.json").write_text("{}")
    seen = []
    monkeypatch.setattr(
        staging.os, "replace", lambda *paths: (os.rename(*paths), seen.append(loads_as(tmp_path / "ours")))
    )
    save_model(world_of_one(), tmp_path, ones, max_shard_size=new_size)
    seen.append(loads_as(tmp_path / "ours"))
    assert seen == sorted(seen, key=["old", "none", "new"].index), seen
    assert seen[-1] == "new" and ("none" in seen) == has_gap
    assert content_of(tmp_path / "ours") == {**content_of(tmp_path / "fresh"), "notes.json": b"{}"}


def fail_on_last_rank(comm, folder, where):
    """Rank 1 fails in the middle of its writes, or rank 0 does where only it acts."""
    error = OSError(28, "No space left on device")

    def refuse(*args, **kwargs):
        raise error

    engine = sharded(ones())
    with pytest.MonkeyPatch.context() as patch:
        if where == "write" and comm.rank == 1:
            patch.setattr(OpenFiles, "write_range", refuse)
        elif where == "sync" and comm.rank == 1:
            patch.setattr(OpenFiles, "sync", refuse)
        elif where == "shards" and comm.rank == 1:
            patch.setattr(engine, "named_shards", lambda: iter([refuse]))
        elif where == "stage":
            patch.setattr(staging.Checkpoint, "_reserve", refuse)
        elif where == "publish":
            patch.setattr(staging, "_move_into", refuse)
        elif where == "config":
            patch.setattr(type(engine.model.config), "save_pretrained", refuse)
        with pytest.raises((CheckpointError, AttributeError)) as caught:
            save_pretrained(engine, folder / "ours")
    failing = 1 if where in ("write", "sync", "shards") else 0
    if comm.rank != failing:
        assert f"saving to {folder / 'ours'}: rank {failing} failed" in str(caught.value)
    comm.barrier()
    save_pretrained(engine, folder / "again")


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("where", ["stage", "config", "write", "shards", "sync", "publish"])
def test_a_failure_on_one_rank_fails_all_and_leaves_the_folder_untouched(tmp_path, where):
    save_model(world_of_one(), tmp_path, models.llama)
    before = content_of(tmp_path / "ours")
    run_ranks(fail_on_last_rank, 2, tmp_path, where)
    assert content_of(tmp_path / "ours") == before
    assert load_file(tmp_path / "again" / "model.safetensors")["lm_head.weight"].eq(1).all()


def test_elements_that_no_rank_wrote_are_noticed(tmp_path, monkeypatch):
    engine = sharded(models.llama())
    shards = list(engine.named_shards())
    shards = [replace(each, start=1, tensor=each.tensor[1:]) if "lm_head" in each.name else each for each in shards]
    monkeypatch.setattr(engine, "named_shards", lambda: iter(shards))
    with pytest.raises(CheckpointError, match="wrote 3900 of the 3904 bytes of tensor 'lm_head.weight'"):
        save_pretrained(engine, tmp_path / "ours")
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_noticed_before_the_first_byte(tmp_path, monkeypatch):
    engine = sharded(models.llama())
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        CheckpointError, match=r"ours: saving takes [0-9.]+ KiB, but 1000 bytes are free; free space there or"
    ):
        save_pretrained(engine, tmp_path / "ours")
    assert os.listdir(tmp_path) == []


def test_a_destination_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "ours").write_text("")
    with pytest.raises(CheckpointError, match=r"saving to .*ours: File exists .*; check that the folder exists"):
        save_pretrained(sharded(models.llama()), tmp_path / "ours")


def test_what_a_killed_run_left_is_removed(tmp_path):
    left = tmp_path / "ours" / "_saving-ours" / "ours"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    save_model(world_of_one(), tmp_path, models.Plain)
    assert set(content_of(tmp_path / "ours")) == {"model.safetensors"}


def test_chosen_parameters_are_saved_under_given_names(tmp_path):
    engine = sharded(models.Plain())
    save_pretrained(
        engine,
        tmp_path,
        weights_name="adapter_model.safetensors",
        keys={"first.bias": "base.first.bias", "steps": "steps"},
        write_beside=lambda staged: (staged / "adapter_config.json").write_text(json.dumps({"r": 8})) and None,
    )
    assert set(content_of(tmp_path)) == {"adapter_model.safetensors", "adapter_config.json"}
    loaded = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(loaded["base.first.bias"], models.Plain().first.bias) and loaded["steps"] == 7
    assert len(loaded) == 2


def test_adapters_are_not_mixed_with_their_base_by_default(tmp_path):
    engine = sharded(models.Plain())
    engine.model.peft_config = {}
    with pytest.raises(CheckpointError, match="Plain has PEFT adapters, .*; pass `keys`"):
        save_pretrained(engine, tmp_path)


@pytest.mark.parametrize("target", ["missing", "empty", "filled"])
def test_a_folder_that_is_a_symbolic_link_stays_one(tmp_path, target):
    disk, link = tmp_path / "disk" / "out", tmp_path / "home" / "out"
    link.parent.mkdir()
    link.symlink_to(disk)
    if target != "missing":
        disk.mkdir(parents=True)
    if target == "filled":
        (disk / "notes.txt").write_text("mine")
    for _ in range(2):
        save_model(world_of_one(), link.parent, models.llama, "out")
    assert link.is_symlink()
    assert os.listdir(link.parent) == ["out"]
    assert os.listdir(disk.parent) == ["out"]
    assert (disk / "model.safetensors").exists()
    assert (disk / "notes.txt").exists() == (target == "filled")


@ranks(2, timeout=60)
def test_the_error_for_a_sharded_peft_model_names_a_way_to_save_it(tmp_path):
    import peft

    folder = tmp_path / "adapters"
    model = peft.get_peft_model(
        models.llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    hf_zero.shard(model, stage=3)
    with pytest.raises(LifecycleError, match=r"save with hf_zero\.save_pretrained\(model, folder\)"):
        model.save_pretrained(folder)  # as callbacks do
    hf_zero.save_pretrained(model, folder)
    with hf_zero.gathered(model):
        wanted = values_of(model)
    loaded = values_of(peft.PeftModel.from_pretrained(models.llama(), folder))
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(loaded[name], value), name


def resized_and_adapted(base, modules, tied):
    """A model with more tokens than the config of its base says, which PEFT finds in the folder `base`."""
    import peft

    if not base.exists():
        models.llama(tied).save_pretrained(base)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(64, mean_resizing=False)
    settings = {"modules_to_save": modules, "ensure_weight_tying": tied, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **settings))


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("is_reachable", [True, False], ids=["online", "offline"])
@pytest.mark.parametrize(
    "modules, tied",
    [(["embed_tokens", "lm_head"], False), (["embed_tokens"], False), (["lm_head"], False), (["embed_tokens"], True)],
    ids=["both", "embedding", "head", "tied"],
)
def test_adapters_of_a_resized_model_are_loaded_whether_or_not_the_base_is_reachable(
    tmp_path, modules, tied, is_reachable
):
    """PEFT saves the embedding layers where it finds the base's config, and then their trained copies twice."""
    pytest.importorskip("peft")
    base = tmp_path / "base"
    model = resized_and_adapted(base, modules, tied)
    engine = engine_of(hf_zero.shard(model))
    base.rename(tmp_path / "moved") if not is_reachable else None
    save_pretrained(engine, tmp_path / "saved")
    with hf_zero.gathered(model, writeback=True):
        wanted = values_of(model)
        for p in model.parameters():
            if p.requires_grad:
                p.data.zero_()
    base.rename(tmp_path / "moved") if is_reachable else (tmp_path / "moved").rename(base)
    load_model(engine, str(tmp_path / "saved"))
    with hf_zero.gathered(model):
        found = values_of(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def save_where_one_rank_finds_the_base(folder):
    model = resized_and_adapted(folder / "base", ["lm_head"], False)
    model.get_input_embeddings().weight.requires_grad_(True)  # only where the base is reachable it is in a file
    rank = dist.get_rank()
    model.peft_config["default"].base_model_name_or_path = str(folder / "base") if rank == 0 else "nowhere"
    assert lost_beside_adapters(model) is None
    engine = engine_of(hf_zero.shard(model))
    save_pretrained(engine, folder / "saved")
    load_model(engine, str(folder / "saved"))


def test_ranks_agree_on_the_files_of_adapters_where_one_does_not_find_the_base(tmp_path):
    pytest.importorskip("peft")
    resized_and_adapted(tmp_path / "base", ["lm_head"], False)
    run_processes(save_where_one_rank_finds_the_base, 2, tmp_path, timeout=60)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc")
@ranks(2)
def test_saving_takes_a_few_mebibytes_however_large_the_shard_is(tmp_path):
    numel = 32 * 2**20
    engine = sharded(torch.nn.Linear(numel // 64, 64, bias=False), half=True)
    save_pretrained(sharded(models.Plain()), tmp_path / "warm")
    reset_resident_peak()
    before = resident_peak_nbytes()
    save_pretrained(engine, tmp_path / "ours")
    # A conversion buffer of 4 MiB, and what the allocator and the interpreter take; a copied shard would be 32 MiB.
    assert resident_peak_nbytes() - before < 16 * 2**20
