import json

import pytest
from huggingface_hub import split_torch_state_dict_into_shards

from hf_zero.checkpoint.safetensors import TensorEntry, WeightFiles, stem_of
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint import models


pytestmark = pytest.mark.quick


def entries_of(model) -> list[TensorEntry]:
    return [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]


@pytest.fixture
def sharded(tmp_path):
    models.llama().save_pretrained(tmp_path, max_shard_size="5KB")
    return tmp_path


@pytest.mark.parametrize("size", ["1KB", "4KB", "0.01MB", 7000, "50GB"])
def test_tensors_are_split_as_transformers_splits_them(size):
    model = models.llama()
    theirs = split_torch_state_dict_into_shards(
        model.state_dict(), filename_pattern="model{suffix}.safetensors", max_shard_size=size
    )
    ours = WeightFiles.plan(entries_of(model), max_shard_size=size)
    assert dict(ours.file_of) == theirs.tensor_to_filename
    assert (ours.index_name is not None) == theirs.is_sharded
    assert json.loads(ours.index_text(1))["metadata"]["total_size"] == theirs.metadata["total_size"]


@pytest.mark.parametrize("size", ["fifty", "5 GiB", "", "GB"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ConfigError, match="is not a size; expected a number of bytes, or text such as '5GB'"):
        WeightFiles.plan([], max_shard_size=size)


def test_a_damaged_part_is_named(sharded):
    part = sorted(sharded.glob("model-*.safetensors"))[1]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{part.name}: truncated, damaged, or"):
        WeightFiles.read(sharded)
    part.unlink()
    with pytest.raises(CheckpointError, match=f"{part.name}: cannot be read .No such file"):
        WeightFiles.read(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "does not map tensors to files"),
        ('{"weight_map": {"a": "b\\u0000c"}}', "truncated, damaged, or not a safetensors file"),
        ('{"a": ' + "[" * 200_000, "cannot be read"),
        ('{"weight_map": {"a": 3}}', "does not map tensors to files"),
    ],
)
def test_a_damaged_index_is_one_line(sharded, text, message):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        WeightFiles.read(sharded)


def test_an_index_that_disagrees_with_its_files_names_the_tensor(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["stranger"] = index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lists tensor 'stranger' in model-.*, which does not contain it"):
        WeightFiles.read(sharded)


def test_weight_files_are_told_by_their_names():
    ours = ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    others = [
        "model.bin",
        "adapter_model.safetensors",
        "model-1-of-2.safetensors",
        "my_model-00001-of-00002.safetensors",
    ]
    assert [name for name in ours + others if stem_of(name) == "model"] == ours
