"""Files of other programs: their tensors come back, and no code in them runs; other files are an error of one line."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from hf_zero.checkpoint.convert import OtherProgramError, program_of
from hf_zero.checkpoint.convert.dcp import _Reader, read_weights
from hf_zero.checkpoint.plain import is_plain
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.errors import CheckpointError
from hf_zero.recipes.cli import main
from hf_zero.trainer.resumable import check_resumable


pytestmark = pytest.mark.quick


class Got:
    """Pickled as what `getattr` gives, which is how Python before 3.11.4 pickles a member of an enumeration."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


def index_with(tmp_path, what):
    index = Metadata(state_dict_metadata={}, planner_data=what, storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    return _Reader(tmp_path).read_metadata()


def test_a_member_of_an_enumeration_is_read_however_it_was_pickled(tmp_path):
    index = index_with(tmp_path, Got(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert index.planner_data is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


@pytest.mark.parametrize("owner, name", [(torch.Size, "mro"), (torch.float32, "itemsize"), (dict, "update")])
def test_no_other_attribute_is_given_to_an_index(tmp_path, owner, name):
    with pytest.raises(CheckpointError, match="refers to .*, which may run code"):
        index_with(tmp_path, Got(owner, name))


def test_tensors_of_every_dtype_and_shape_come_back(tmp_path):
    tensors = {
        "half": torch.randn(3, 4).bfloat16(),
        "scalar": torch.tensor(2.5),
        "whole": torch.arange(7),
        "empty": torch.zeros(0, 4),
        "columns": torch.arange(6.0).view(2, 3).t(),
    }
    dcp.save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    found = read_weights(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_folder_of_our_own_is_no_other_programs(tmp_path):
    for name in ("optimizer.pt", ".metadata"):
        (tmp_path / name).touch()
    assert is_plain(tmp_path) and program_of(tmp_path).name == "torch.distributed.checkpoint"
    (tmp_path / "zero_manifest.json").touch()
    assert not is_plain(tmp_path) and program_of(tmp_path) is None


def refuse(act, match):
    with pytest.raises(CheckpointError, match=match) as error:
        act()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [3, {"a": 1}, [], "text"])
def test_an_index_of_another_type_is_one_line(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    refuse(lambda: read_weights(tmp_path), "expected the index of a torch distributed checkpoint")


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}.", b"\0" * 100])
def test_a_file_that_is_no_archive_is_one_line(tmp_path, content, mmap):
    (tmp_path / "scheduler.pt").write_bytes(content)
    refuse(lambda: load_safely(tmp_path / "scheduler.pt", mmap=mmap), "scheduler.pt: cannot be read")


@pytest.mark.parametrize("joins", [False, True])
def test_a_checkpoint_in_safetensors_is_refused_since_it_has_no_optimizer(tmp_path, joins, capsys):
    folder = tmp_path / "checkpoint-3"
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=joins)
    dcp.save({"weight": torch.randn(3, 4)}, storage_writer=writer, no_dist=True)
    told = (
        f"{folder}: was written by torch's HuggingFaceStorageWriter, whose format has no optimizer state; resume from"
    )
    with pytest.raises(OtherProgramError, match=told):
        check_resumable(folder)
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
