"""How a foreign checkpoint's tensors are put together from their pieces."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from hf_zero.checkpoint.foreign.dcp import _runs, read_weights
from hf_zero.checkpoint.foreign.detect import Carried, carried, detect
from hf_zero.checkpoint.foreign.parts import FileTensor, Piece, pieces_of, window_of
from hf_zero.checkpoint.foreign.trusted import load_index
from hf_zero.errors import CheckpointError


class Got:
    """Pickled as what `getattr` gives, which is how Python before 3.11.4 pickles a member of an enumeration."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


def index_with(tmp_path, what):
    index = Metadata(state_dict_metadata={}, planner_data=what)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    return load_index(tmp_path / ".metadata")


def test_a_member_of_an_enumeration_is_read_however_it_was_pickled(tmp_path):
    index = index_with(tmp_path, Got(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert index.planner_data.args == ("TORCH_CHANNELS_LAST",)


@pytest.mark.parametrize("owner, name", [(torch.Size, "mro"), (torch.float32, "itemsize"), (dict, "update")])
def test_no_other_attribute_is_given_to_an_index(tmp_path, owner, name):
    with pytest.raises(CheckpointError, match="names .*, which may run code"):
        index_with(tmp_path, Got(owner, name))


def test_any_range_is_read_across_pieces_and_converted():
    parts = [torch.arange(5.0), torch.arange(5.0, 6.0), torch.arange(6.0, 20.0)]
    tensor = FileTensor.build("t", (3, 5), pieces_of(parts, 2, 15))
    for start in range(15):
        for stop in range(start, 16):
            out = torch.empty(stop - start, dtype=torch.bfloat16)
            tensor.read_range(start, out)
            assert out.tolist() == list(range(start + 2, stop + 2))


@pytest.mark.parametrize("places", [[(0, 3)], [(1, 5)], [(0, 2), (3, 3)], [(0, 4), (3, 3)]])
def test_pieces_that_do_not_tile_the_tensor_are_refused(places):
    pieces = [Piece(start, numel, window_of(torch.zeros(numel))) for start, numel in places]
    with pytest.raises(CheckpointError, match=r"t: its pieces .* its shape \[2, 3\] has 6"):
        FileTensor.build("t", (2, 3), pieces)


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((4, 5), (1, 0), (2, 5)),
        ((4, 5), (0, 2), (4, 3)),
        ((3, 4, 5), (1, 1, 0), (2, 2, 5)),
        ((7,), (2,), (4,)),
        ((), (), ()),
    ],
)
def test_boxes_of_any_shape_lie_where_torch_has_them(shape, offsets, sizes):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))].reshape(-1)
    found = {}
    for start, within, numel in _runs(shape, offsets, sizes):
        for index in range(numel):
            found[within + index] = start + index
    assert [found[index] for index in range(len(found))] == box.tolist()


def test_rows_of_one_shard_are_one_run():
    assert list(_runs((100, 8, 4), (25, 0, 0), (25, 8, 4))) == [(800, 0, 800)]
    assert list(_runs((100, 8), (25, 0), (0, 8))) == []


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
        out = torch.empty(tensor.numel(), dtype=tensor.dtype)
        found[name].read_range(0, out)
        assert torch.equal(out.view(tensor.shape), tensor), name


def test_what_else_a_folder_carries_is_said(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 12}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / name).touch()
    assert carried(tmp_path) == Carried(num_steps=12, position=True, scheduler=True, rng_ranks=2)


def test_a_folder_of_our_own_is_not_foreign(tmp_path):
    (tmp_path / "zero").mkdir()
    (tmp_path / "optimizer.pt").touch()
    assert detect(tmp_path).name == "Trainer"
    (tmp_path / "zero" / "manifest.json").touch()
    assert detect(tmp_path) is None
