"""How a foreign checkpoint's tensors are put together from their pieces."""

import pickle
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from hf_zero.checkpoint.foreign import Carried, carried, detect
from hf_zero.checkpoint.foreign.dcp import _Folder, read_weights
from hf_zero.checkpoint.foreign.parts import Box, ForeignTensor, boxes_of, slabs
from hf_zero.checkpoint.foreign.trusted import load_index
from hf_zero.errors import CheckpointError


pytestmark = pytest.mark.quick


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
    tensor = ForeignTensor.build("t", (3, 5), boxes_of(parts, 2, 15), is_flat=True)
    for start in range(15):
        for stop in range(start, 16):
            out = torch.empty(stop - start, dtype=torch.bfloat16)
            tensor.read_range(start, out)
            assert out.tolist() == list(range(start + 2, stop + 2))


@pytest.mark.parametrize("places", [[(0, 3)], [(1, 5)], [(0, 2), (3, 3)], [(0, 4), (3, 3)]])
def test_parts_that_do_not_tile_the_flattened_tensor_are_refused(places):
    boxes = [Box((start,), (numel,), lambda: pytest.fail("nobody reads it")) for start, numel in places]
    with pytest.raises(CheckpointError, match=r"t: its parts .* its shape \[2, 3\] 6"):
        ForeignTensor.build("t", (2, 3), boxes, is_flat=True)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 1, 4), (2, 2, 3)])
def test_a_range_of_a_flattened_tensor_is_a_few_rectangles(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            found = [whole[tuple(slice(*bounds) for bounds in slab)].flatten() for slab in slabs(shape, start, stop)]
            assert [index for part in found for index in part.tolist()] == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((4, 5), (1, 0), (2, 5)),
        ((4, 5), (0, 2), (4, 3)),
        ((3, 4, 5), (1, 1, 0), (2, 2, 5)),
        ((7,), (2,), (4,)),
        ((3, 4), (1, 2), (1, 1)),
        ((2, 3, 4), (0, 1, 2), (2, 1, 2)),
        ((), (), ()),
    ],
)
def test_boxes_of_any_shape_lie_where_torch_has_them(shape, offsets, sizes):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    part = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]
    inside = set(part.reshape(-1).tolist())
    box = Box(offsets, sizes, lambda: part.contiguous().clone())
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            out = torch.full((2 * (stop - start),), -1)[::2]  # what is filled may have strides
            box.read_into(shape, start, out)
            assert out.tolist() == [index if index in inside else -1 for index in range(start, stop)]


def test_a_box_is_loaded_only_where_a_range_lies_in_it():
    box = Box((0, 2), (4, 3), lambda: pytest.fail("nobody reads it"))
    box.read_into((4, 5), 0, torch.empty(2))
    box.read_into((4, 5), 5, torch.empty(2))
    Box((1, 0), (0, 5), box.load).read_into((4, 5), 0, torch.empty(20))


@pytest.mark.parametrize(
    "places",
    [
        [((0, 0), (2, 2))],
        [((0, 0), (2, 2)), ((0, 1), (2, 1))],
        [((0, 0), (2, 2)), ((0, 1), (1, 2)), ((1, 2), (1, 1))],
    ],
)
def test_boxes_that_do_not_tile_the_tensor_are_refused(places):
    boxes = [Box(offsets, sizes, lambda: pytest.fail("nobody reads it")) for offsets, sizes in places]
    with pytest.raises(CheckpointError, match=r"t: its parts .* its shape \[2, 3\] 6"):
        ForeignTensor.build("t", (2, 3), boxes, is_flat=False)


def test_experts_divided_on_their_last_dimension_take_no_memory_for_each_row(tmp_path):
    shape, num_ranks = (128, 4096, 14336), 64  # 33.6 million runs of 224 elements
    sizes = (128, 4096, 14336 // num_ranks)
    nbytes = 2 * torch.Size(sizes).numel()
    with open(tmp_path / "data.distcp", "wb") as file:
        file.truncate(nbytes)  # nothing of it is read, and it takes no room
    chunks = [SimpleNamespace(offsets=(0, 0, sizes[2] * rank), sizes=sizes) for rank in range(num_ranks)]
    place = SimpleNamespace(relative_path="data.distcp", offset=0, length=nbytes)
    index = SimpleNamespace(state_dict_metadata={"model.w": SimpleNamespace(size=shape, chunks=chunks)})
    tracemalloc.start()
    tensor = _Folder(tmp_path, index, {("model.w", chunk.offsets): place for chunk in chunks}).tensor("model.w")
    assert tracemalloc.get_traced_memory()[1] < 2**20  # 64 boxes of some hundred bytes
    tracemalloc.stop()
    assert tensor.shape == shape and len(tensor.boxes) == num_ranks


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


def test_a_checkpoint_in_safetensors_format_is_refused_by_that_name(tmp_path):
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": {"weight": torch.ones(2, 3)}}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match="is in safetensors format, .* its default serialization_format"):
        read_weights(tmp_path)


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
