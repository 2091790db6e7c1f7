"""Models whose weights stay in the files until they are sharded are those that transformers loads whole."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants, file_download
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hf_zero
from benchmarks.counters import reset_resident_peak, resident_peak_nbytes
from hf_zero.checkpoint import load_pretrained, pretrained_class
from hf_zero.checkpoint.pretrained import lazy_loading
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoint import models
from tests.checkpoint.subjects import run_ranks, world_of_one
from tests.checkpoint.tiny_models import known, tiny
from tests.distributed import ranks


def same_model(direct, whole):
    """All but the weights, which are not there yet."""
    assert type(direct) is type(whole) and direct.training == whole.training
    assert direct.config.to_dict() == whole.config.to_dict()
    for (name, ours), (other, theirs) in zip(direct.named_parameters(), whole.named_parameters(), strict=True):
        assert (name, ours.dtype, ours.shape, ours.requires_grad) == (
            other,
            theirs.dtype,
            theirs.shape,
            theirs.requires_grad,
        )
    for (name, ours), (other, theirs) in zip(direct.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    if getattr(whole, "generation_config", None) is not None:
        assert direct.generation_config.to_dict() == whole.generation_config.to_dict()


def both(auto_class, folder, **kwargs):
    torch.manual_seed(7)
    whole = auto_class.from_pretrained(folder, **kwargs)
    torch.manual_seed(7)
    direct = load_pretrained(auto_class, folder, **kwargs)
    return direct, whole


def check(comm, folder, auto_class, kwargs, settings):
    for each in settings:
        direct, whole = both(auto_class, folder, **kwargs)
        same_model(direct, whole)
        assert any(p.device.type == "meta" for p in direct.parameters())
        identities = [id(p) for p in direct.parameters()]
        compare_sharded(direct, whole, each)
        assert identities == [id(p) for p in direct.parameters()]


def compare_sharded(direct, whole, settings):
    engine = engine_of(hf_zero.shard(direct, **settings))
    for shard in engine.named_shards(resident=True):
        wanted = whole.get_parameter(shard.name).detach().reshape(-1)[shard.start :][: shard.tensor.numel()]
        assert torch.equal(shard.tensor, wanted.to(shard.tensor.dtype)), shard.name
    with hf_zero.gathered(direct):
        for name, wanted in whole.named_parameters():
            ours = direct.get_parameter(name)
            assert torch.equal(ours, wanted.to(ours.dtype)), name
    assert not hf_zero.engine.has_sources(direct)


SETTINGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "compute_dtype": torch.bfloat16},
    {"stage": 3},
    {"stage": 3, "shared_memory": False},
    {"stage": 3, "compute_dtype": torch.bfloat16},
    {"stage": 3, "compute_dtype": torch.bfloat16, "shared_memory": False},
]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_tied_model_at_every_stage(tmp_path, num_ranks):
    models.tied_llama().save_pretrained(tmp_path)
    run_ranks(check, num_ranks, tmp_path, AutoModelForCausalLM, {}, SETTINGS)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_new_head_gets_the_values_that_transformers_gives_it(tmp_path, num_ranks):
    models.bert().bert.save_pretrained(tmp_path)
    allowed = {"num_labels": 3}
    run_ranks(check_new_head, num_ranks, tmp_path, AutoModelForSequenceClassification, allowed)


def check_new_head(comm, folder, auto_class, kwargs):
    for settings in SETTINGS:
        torch.manual_seed(7)
        whole = auto_class.from_pretrained(folder, **kwargs)
        torch.manual_seed(7 + comm.rank)  # rank 0's head is everyone's
        direct = load_pretrained(auto_class, folder, allow_missing=["bert.pooler"], **kwargs)
        compare_sharded(direct, whole, settings)


def half_llama():
    return models.llama().bfloat16()


FEW = [{"stage": 3}, {"stage": 2, "shared_memory": False}]
DTYPES = [torch.bfloat16, torch.float16, "auto", "bfloat16"]
ROUNDED = [{"stage": 3}, {"stage": 3, "compute_dtype": torch.float16}]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("build", "auto_class", "kwargs", "settings"),
    [
        # some modules of T5 stay in fp32
        *((models.t5, AutoModelForSeq2SeqLM, {"dtype": dtype}, ROUNDED) for dtype in DTYPES),
        (half_llama, AutoModelForCausalLM, {"dtype": torch.float32}, [{"stage": 3}]),
        (models.t5, AutoModelForSeq2SeqLM, {}, FEW),
        (models.mixtral, AutoModelForCausalLM, {}, FEW),
        (models.gpt2, AutoModelForCausalLM, {}, FEW),
        (models.bert, AutoModelForMaskedLM, {}, FEW),
    ],
)
def test_other_models_several_files_and_other_dtypes(tmp_path, build, auto_class, kwargs, settings):
    build().save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    run_ranks(check, 2, tmp_path, auto_class, kwargs, settings)


@pytest.mark.parametrize(
    "model_type", known("qwen3_vl_moe", "jina_embeddings_v3", "kimi_k25", "inkling2_text", "llava")
)
def test_converted_models(tmp_path, model_type):
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    run_ranks(check, 2, tmp_path, type(model), {}, [{"stage": 3}])


def save_as_bin(model, path, **options):
    model.config.save_pretrained(path.parent)
    torch.save(model.state_dict(), path, **options)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_pickled_files_are_loaded_whole(tmp_path, options):
    save_as_bin(models.llama(), tmp_path / "pytorch_model.bin", **options)
    direct, whole = both(AutoModelForCausalLM, tmp_path)
    assert not hf_zero.engine.has_sources(direct)
    compare_sharded(direct, whole, {"stage": 3})


@pytest.fixture
def saved(tmp_path):
    models.llama().save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def changed(path, drop=(), **tensors):
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file(kept | tensors, path, metadata={"format": "pt"})


def test_arguments_do_what_they_do_in_transformers(saved):
    nested = {"subfolder": saved.parent.name, "attn_implementation": "eager", "output_loading_info": True}
    (direct, ours), (whole, theirs) = both(AutoModelForCausalLM, saved.parent.parent, **nested)
    assert ours == theirs and direct.config._attn_implementation == "eager"
    same_model(direct, whole)


def test_what_is_missing_and_unexpected_is_reported_as_by_transformers(saved, caplog):
    changed(saved, drop=["lm_head.weight"], stranger=torch.zeros(1))
    (direct, ours), (whole, theirs) = both(AutoModelForCausalLM, saved.parent, output_loading_info=True)
    assert ours == theirs and ours["missing_keys"] == {"lm_head.weight"} and ours["unexpected_keys"] == {"stranger"}
    assert torch.equal(direct.lm_head.weight, whole.lm_head.weight)
    compare_sharded(direct, whole, {"stage": 3})


def test_a_missing_tensor_of_the_base_model_is_an_error(saved):
    changed(saved, drop=["model.norm.weight", "lm_head.weight"])
    with pytest.raises(
        CheckpointError, match=r"1 tensors of the base model are missing \(model.norm.weight\); pass a"
    ):
        load_pretrained(AutoModelForCausalLM, saved.parent)
    with pytest.raises(CheckpointError, match=r"\(norm.weight\).*allow_missing=\['norm'\]"):
        load_pretrained(AutoModel, saved.parent)
    direct = load_pretrained(AutoModelForCausalLM, saved.parent, allow_missing=["model.norm"])
    assert bool((direct.model.norm.weight == 1).all())


def test_another_shape_is_an_error_unless_it_is_to_be_ignored(saved):
    changed(saved, **{"lm_head.weight": torch.zeros(61, 8)})
    match = r"'lm_head.weight' has shape \[61, 8\], the model's has \[61, 16\]; load .* ignore_mismatched_sizes=True"
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(AutoModelForCausalLM, saved.parent)
    direct, whole = both(AutoModelForCausalLM, saved.parent, ignore_mismatched_sizes=True)
    compare_sharded(direct, whole, {"stage": 3})


def test_both_sides_of_a_tie_are_compared(tmp_path):
    models.tied_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    embedding = load_file(path)["model.embed_tokens.weight"]
    changed(path, **{"lm_head.weight": embedding.clone()})
    direct, whole = both(AutoModelForCausalLM, tmp_path)
    assert direct.lm_head.weight is direct.model.embed_tokens.weight
    same_model(direct, whole)
    changed(path, **{"lm_head.weight": embedding + 1})
    direct, whole = both(AutoModelForCausalLM, tmp_path)
    assert direct.lm_head.weight is not direct.model.embed_tokens.weight
    same_model(direct, whole)
    compare_sharded(direct, whole, {"stage": 3})


def test_a_model_can_be_read_whole(saved):
    direct, whole = both(AutoModelForCausalLM, saved.parent)
    with pytest.raises((NotImplementedError, RuntimeError)):
        direct(torch.tensor([[1]])).logits.sum().item()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(hf_zero.materialize(direct)(tokens).logits, whole(tokens).logits)


def test_a_model_that_was_cast_is_rounded_as_it_would_have_been(saved):
    direct, whole = both(AutoModelForCausalLM, saved.parent)
    compare_sharded(direct.half(), whole.half(), {"stage": 3, "compute_dtype": torch.bfloat16})


def test_a_file_that_has_changed_in_the_meantime_is_noticed(saved):
    direct = load_pretrained(AutoModelForCausalLM, saved.parent)
    changed(saved, stranger=torch.zeros(1))
    with pytest.raises(CheckpointError, match="model.safetensors: was changed or removed after the model was loaded"):
        hf_zero.shard(direct)


def test_a_parameter_that_nobody_can_read_is_refused(saved):
    direct = load_pretrained(AutoModelForCausalLM, saved.parent)
    direct.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedError, match="extra: has no data .meta device. and no file to read it from"):
        hf_zero.shard(direct)


NAME, COMMIT = "someone/model", "0123456789" * 4


def _answer(monkeypatch, error: Exception) -> None:
    """Makes the hub answer so, or no hub."""

    def head(**_):
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", head)


def _in_cache(cache: Path) -> Path:
    """The folder of a pinned revision in a cache of its own."""
    folder = cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "kind, match",
    [
        (GatedRepoError, "have access to it at https.*: is restricted"),
        (
            RepositoryNotFoundError,
            "not a valid model identifier listed on .*; check the name, or pass a",
        ),
        (None, "couldn't connect to 'https.*; check the name, or pass a local folder"),
    ],
)
def test_what_a_hub_says_of_a_name_is_told(tmp_path, monkeypatch, kind, match):
    refused = SimpleNamespace(headers={}, request=None, status_code=401)
    _answer(monkeypatch, OfflineModeIsEnabled("down") if kind is None else kind(": is restricted", response=refused))
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(AutoModelForCausalLM, NAME, cache_dir=tmp_path)


def test_an_adapter_of_a_pinned_revision_is_found_in_a_cache_of_its_own(tmp_path, monkeypatch):
    models.llama().save_pretrained(tmp_path / "base")
    adapted = adapt(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    adapted.save_pretrained(_in_cache(tmp_path / "cache"))
    _answer(monkeypatch, OfflineModeIsEnabled("down"))
    loaded = load_pretrained(LlamaForCausalLM, NAME, cache_dir=tmp_path / "cache", revision=COMMIT)
    assert any("lora_A" in name for name, _ in loaded.named_parameters())


def test_placing_parameters_otherwise_is_refused(saved):
    with pytest.raises(ConfigError, match="load_pretrained: device_map='auto' places parameters"):
        load_pretrained(AutoModelForCausalLM, saved.parent, device_map="auto")


def test_other_models_load_as_ever_meanwhile_and_afterwards(saved):
    load_pretrained(AutoModelForCausalLM, saved.parent)
    assert LlamaForCausalLM.from_pretrained(saved.parent).device.type == "cpu"


def adapt(model):
    import peft

    torch.manual_seed(3)
    with hf_zero.placeholders(model):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    return adapted


@ranks(2)
def test_adapters_are_added_before_the_weights_are_read(saved):
    folder = saved.parent
    whole, direct = (
        adapt(load(AutoModelForCausalLM, folder))
        for load in (lambda auto_class, path: auto_class.from_pretrained(path), load_pretrained)
    )
    assert [name for name, p in whole.named_parameters() if p.requires_grad] == [
        name for name, p in direct.named_parameters() if p.requires_grad
    ]
    for settings in ({"stage": 3}, {"stage": 2, "shared_memory": False}):
        compare_sharded(adapt(load_pretrained(AutoModelForCausalLM, folder)), whole, settings)


def test_what_is_computed_from_weights_that_are_not_there_is_refused(saved):
    direct = load_pretrained(AutoModelForCausalLM, saved.parent)
    with pytest.raises(
        UnsupportedError, match="embed_tokens.weight: was computed from weights that are still in files"
    ):
        with hf_zero.placeholders(direct):
            direct.resize_token_embeddings(70, mean_resizing=False)
    direct = load_pretrained(AutoModelForCausalLM, saved.parent)
    direct.resize_token_embeddings(70, mean_resizing=False)
    with pytest.raises(UnsupportedError, match="(has no data .meta device.|was computed from weights)"):
        hf_zero.shard(direct)
    direct = load_pretrained(AutoModelForCausalLM, saved.parent)
    hf_zero.materialize(direct).resize_token_embeddings(70)
    hf_zero.shard(direct)


@ranks(2)
def test_a_rank_that_cannot_read_fails_all(saved):
    comm, folder = world_of_one(), saved.parent
    model = load_pretrained(AutoModelForCausalLM, folder)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(OpenFiles, "read_range", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises((CheckpointError, OSError)) as caught:
            hf_zero.shard(model)
    assert "gone" in str(caught.value) and (comm.rank == 1 or "rank 1 failed" in str(caught.value))
    comm.barrier()
    hf_zero.shard(model)  # it can be tried again


@ranks(2)
def test_ranks_that_load_in_different_ways_are_told(saved):
    comm, folder = world_of_one(), saved.parent
    load = load_pretrained if comm.rank == 0 else lambda cls, path: cls.from_pretrained(path)
    with pytest.raises(CheckpointError, match="load the model in the same way on every rank"):
        hf_zero.shard(load(AutoModelForCausalLM, folder))


def large_llama():
    return LlamaConfig(
        vocab_size=4000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8
    )


def load_and_measure(comm, folder, model_nbytes, dtype, shared_memory):
    load_pretrained(AutoModelForCausalLM, folder / "small")  # what is imported and cached on the way
    comm.barrier()
    reset_resident_peak()
    before = resident_peak_nbytes()
    model = load_pretrained(AutoModelForCausalLM, folder / "large", dtype=dtype)
    engine = engine_of(hf_zero.shard(model, stage=3, shared_memory=shared_memory))
    grown = resident_peak_nbytes() - before
    held = sum(shard.tensor.nbytes for shard in engine.named_shards())
    assert held <= model_nbytes / 4 * 1.01
    # its shard and a conversion buffer of 4 MiB; the rest is the model's modules, and what the allocator keeps
    assert grown < held + 4 * 2**20 + 10 * 2**20, (grown, held, model_nbytes)


@pytest.mark.quick(cases=1)
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_of_four_never_holds_more_than_its_quarter(tmp_path, dtype, shared_memory):
    models.llama().save_pretrained(tmp_path / "small")
    model = LlamaForCausalLM(large_llama())
    nbytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    model.save_pretrained(tmp_path / "large")
    assert nbytes > 35 * 2**20
    run_ranks(load_and_measure, 4, tmp_path, nbytes, dtype, shared_memory)


def test_another_version_of_transformers_is_refused_by_name(saved, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(lambda model, loading_info: None))
    wanted = r"_finalize_model_loading takes \(model, loading_info\) in transformers .* expects \(model, load_config, "
    with pytest.raises(ConfigError, match=wanted):
        load_pretrained(AutoModelForCausalLM, saved.parent)
    monkeypatch.delattr(PreTrainedModel, "_finalize_model_loading")
    with pytest.raises(ConfigError, match="_finalize_model_loading does not exist"):
        load_pretrained(AutoModelForCausalLM, saved.parent)


def test_a_version_of_transformers_that_passes_more_loads_as_before(saved, monkeypatch):
    load = PreTrainedModel._load_pretrained_model

    def newer(model, state_dict, checkpoint_files, load_config, expected_keys=None, workers=1):
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(newer))
    with lazy_loading(()):
        passes = partial(PreTrainedModel._load_pretrained_model, workers=2)
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(passes))
        direct = LlamaForCausalLM.from_pretrained(saved.parent)
    assert direct.lm_head.weight.device.type == "meta"


@pytest.mark.parametrize("build", [models.bert, models.t5, models.llama])
def test_the_class_of_a_checkpoint_is_read_off_its_config(tmp_path, build):
    build().save_pretrained(tmp_path)
    assert pretrained_class(tmp_path) is type(build())
    assert pretrained_class(tmp_path.parent, subfolder=tmp_path.name, dtype=torch.bfloat16) is type(build())


def test_a_config_without_a_known_class_is_refused(saved):
    path = saved.parent / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaForPoetry"))
    with pytest.raises(CheckpointError, match="its config names LlamaForPoetry, which transformers .* does not have"):
        pretrained_class(saved.parent)
