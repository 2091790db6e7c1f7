"""Files have the keys, shapes and bytes that transformers would write, and whatever it would load is loaded."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter

import hf_zero
from hf_zero.checkpoint import load_weights, save_pretrained
from hf_zero.errors import CheckpointError
from tests.checkpoint import models
from tests.checkpoint.subjects import part_of, run_ranks, sharded, values_of, world_of_one
from tests.checkpoint.tiny_models import known, tiny
from tests.distributed import ranks


# Experts merged (first row), with a transpose, interleaved, permuted for rope, chunked or concatenated projections.
ON_TWO_RANKS = (
    "mixtral qwen2_moe qwen3_moe deepseek_v3 olmoe longcat_flash nemotron_h "
    "qwen3_vl_moe inkling_mm_model inkling2_text kimi_k25 mistral_large4 "
    "hrm_text jina_embeddings_v3 gte qianfan_ocr sapiens2 olmo_hybrid step3p7"
).split()
ON_ONE_RANK = (
    "afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe "
    "exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe hy_v3 jamba "
    "kimi_linear kolibri1 laguna mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral_large4_text "
    "nomic_bert phimoe qwen3_5_moe_text qwen3_next qwen4_exp_text solar_open gpt_neox llava vit"
).split()


def blank(model):
    for tensor in model.state_dict().values():
        tensor.fill_(-1)
    return model


def round_trip(comm, folder, model_type):
    """What is saved is what transformers saves; that is loaded here, and what is saved here by transformers."""
    model = tiny(model_type)
    save_pretrained(sharded(tiny(model_type)), folder / "ours")
    if comm.rank == 0:
        model.save_pretrained(folder / "theirs")
        ours, theirs = ((folder / name / "model.safetensors").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs
        loaded, report = type(model).from_pretrained(folder / "ours", output_loading_info=True)
        assert not any(report.values())
        assert all(torch.equal(*pair) for pair in zip(loaded.state_dict().values(), model.state_dict().values()))
    comm.barrier()
    engine = sharded(blank(tiny(model_type)))
    load_weights(engine, folder / "theirs")
    for shard in engine.named_shards():
        assert torch.equal(shard.tensor, part_of(model.get_parameter(shard.name), shard)), shard.name


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("model_type", known(*ON_TWO_RANKS))
@pytest.mark.full("more cases", after=6)
def test_two_ranks_write_and_read_what_transformers_does(tmp_path, model_type):
    run_ranks(round_trip, 2, tmp_path, model_type)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("model_type", known(*ON_ONE_RANK))
@pytest.mark.full("more cases", after=10)
def test_one_rank_writes_and_reads_what_transformers_does(tmp_path, model_type):
    round_trip(world_of_one(), tmp_path, model_type)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_vl_moe", "jina_embeddings_v3"])
@ranks(2)
def test_a_sharded_model_is_saved_and_loaded_under_the_original_keys(tmp_path, model_type):
    comm = world_of_one()
    model = tiny(model_type)
    if comm.rank == 0:
        model.save_pretrained(tmp_path / "theirs")
    hf_zero.save_pretrained(hf_zero.shard(model), tmp_path / "ours")
    engine = hf_zero.shard(blank(tiny(model_type)))
    load_weights(engine, tmp_path / "theirs")
    hf_zero.save_pretrained(engine, tmp_path / "again")
    if comm.rank == 0:
        files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs", "again")]
        assert files[0] == files[1] == files[2]


def test_several_files_keep_to_their_size_and_hold_what_transformers_writes(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    num_parameters = model.num_parameters()
    save_pretrained(sharded(model), tmp_path / "ours", max_shard_size="50KB")
    paths = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    ours = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    theirs = load_file(tmp_path / "first" / "model.safetensors")
    assert len(paths) > 5 and all(sum(t.nbytes for t in load_file(path).values()) <= 50_000 for path in paths)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == num_parameters


def test_a_renamed_model_that_was_loaded_is_split_over_files_as_transformers_does(tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    save_pretrained(sharded(model), tmp_path / "ours", max_shard_size="20KB")
    indexes = [(tmp_path / name / "model.safetensors.index.json").read_text() for name in ("ours", "theirs")]
    assert indexes[0] == indexes[1]


def loads(build, folder):
    engine = sharded(blank(build()))
    load_weights(engine, folder)
    values = values_of(engine)
    for name, p in build().named_parameters():
        assert torch.equal(values[name], p.detach().reshape(-1)), name


def test_masters_of_converted_tensors_have_every_bit_of_the_files(tmp_path):
    models.mixtral().save_pretrained(tmp_path)
    engine = sharded(blank(models.mixtral()), half=True)
    load_weights(engine, tmp_path)
    values = values_of(engine)
    for name, p in models.mixtral().named_parameters():
        assert torch.equal(values[name], p.detach().reshape(-1)), name


def test_a_folder_under_the_models_own_keys_is_loaded(tmp_path):
    models.mixtral().save_pretrained(tmp_path, save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    loads(models.mixtral, tmp_path)


def test_the_prefix_of_the_base_model_may_be_there_or_not(tmp_path):
    models.tied_llama().model.save_pretrained(tmp_path / "base")  # its head is tied to the embeddings
    loads(models.tied_llama, tmp_path / "base")
    models.tied_llama().save_pretrained(tmp_path / "whole")
    loads(lambda: models.tied_llama().model, tmp_path / "whole")


def test_names_of_older_versions_are_loaded(tmp_path):
    model = models.bert()
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): t.clone() for name, t in model.state_dict().items()
    }
    tensors = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in tensors.items()}
    assert any("gamma" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    loads(models.bert, tmp_path)


def test_a_key_mapping_that_the_model_was_loaded_with_is_used_again(tmp_path):
    models.llama().save_pretrained(tmp_path / "first")
    renamed = {f"net.{name}": tensor for name, tensor in load_file(tmp_path / "first" / "model.safetensors").items()}
    (tmp_path / "net").mkdir()
    save_file(renamed, tmp_path / "net" / "model.safetensors", metadata={"format": "pt"})
    models.llama().config.save_pretrained(tmp_path / "net")
    model, again = (
        type(models.llama()).from_pretrained(tmp_path / "net", key_mapping={"^net.": ""}) for _ in range(2)
    )
    model.save_pretrained(tmp_path / "theirs")
    save_pretrained(sharded(model), tmp_path / "ours")
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs
    engine = sharded(blank(again))
    load_weights(engine, tmp_path / "ours")
    assert torch.equal(values_of(engine)["lm_head.weight"], models.llama().lm_head.weight.reshape(-1))


class Doubled(ConversionOps):
    """Computes, where all of transformers' own conversions only move elements."""

    def __init__(self, factor=2.0):
        self.factor = factor

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        tensor = tensor.t().contiguous()
        tensor *= self.factor
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self):
        return Doubled(1 / self.factor)


def doubled_llama():
    model = models.llama()
    model._weight_conversions = [WeightConverter("halved_proj", "o_proj", operations=[Doubled()])]
    return model


def in_halves(shards, **kwargs):
    """Two ranges of each parameter, as where its buffer is read from disk in windows."""
    for shard in shards(**kwargs):
        middle = shard.tensor.numel() // 2
        yield replace(shard, tensor=shard.tensor[:middle])
        yield replace(shard, start=shard.start + middle, tensor=shard.tensor[middle:])


@ranks(2)
def test_conversions_that_compute_are_done_on_whole_tensors(tmp_path):
    comm = world_of_one()
    model = doubled_llama()
    engine = sharded(doubled_llama())
    with mock.patch.object(engine, "named_shards", partial(in_halves, engine.named_shards)):
        save_pretrained(engine, tmp_path / "ours")
    if comm.rank == 0:
        model.save_pretrained(tmp_path / "theirs")
        ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs and b"halved_proj" in ours
    engine = sharded(blank(doubled_llama()))
    load_weights(engine, tmp_path / "ours")
    for shard in engine.named_shards():
        assert torch.equal(shard.tensor, part_of(model.get_parameter(shard.name), shard)), shard.name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["conversion", "shards"])
@ranks(2)
def test_a_rank_without_room_for_a_whole_tensor_leaves_nobody_waiting(tmp_path, rank, where):
    """No memory for a tensor on one rank; the other ones wait for it in vain for no longer than it takes to say so."""
    comm = world_of_one()

    def refuse(*args, **_):
        if where == "conversion" and all(tensor.is_meta for (tensor,) in args[1].values()):  # while it is planned
            return {"halved_proj": torch.empty(16, 16, device="meta")}
        raise MemoryError("no room for a tensor")

    engine = sharded(doubled_llama())
    place = {"conversion": (Doubled, "convert"), "shards": (engine, "named_shards")}[where]
    with mock.patch.object(*place, refuse) if comm.rank == rank else nullcontext():
        with pytest.raises(CheckpointError if comm.rank != rank else MemoryError, match="no room for a tensor"):
            save_pretrained(engine, tmp_path / "failed")
    assert not (tmp_path / "failed" / "model.safetensors").exists()
    save_pretrained(sharded(doubled_llama()), tmp_path / "ours")


def test_tensors_that_cannot_be_converted_are_named(tmp_path):
    model = models.mixtral()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = torch.zeros(3, 3)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="gate_up_proj: the checkpoint's tensors cannot be converted"):
        load_weights(sharded(model), tmp_path)
