"""Files that claim more than they hold, or are nested without end: one line, in bounded memory."""

import pickle
import tracemalloc
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_zero.checkpoint.convert import dcp
from hf_zero.checkpoint.convert.deepspeed import tag_folder
from hf_zero.checkpoint.format import FileLayout
from hf_zero.checkpoint.trusted import load_mapped, load_small
from hf_zero.errors import CheckpointError


def archive(path, pickled: bytes, compression=zipfile.ZIP_STORED):
    """A file of `torch.save` with another pickle in it."""
    torch.save({"last_epoch": 3}, path)
    with zipfile.ZipFile(path) as file:
        members = {member.filename: file.read(member) for member in file.infolist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, pickled if name.endswith("data.pkl") else content)
    return path


def refuse(act, match):
    """One line, for which Python has taken no more than 64 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=match) as error:
            act()
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_unread(tmp_path):
    path = archive(tmp_path / "scheduler.pt", b"\0" * 300_000_000, zipfile.ZIP_DEFLATED)
    refuse(lambda: load_small(path), "unpacks to 300000... bytes, more than its size")


def test_a_small_file_that_asks_for_gigabytes_by_a_number_is_refused(tmp_path):
    asks = b"\x80\x02cbuiltins\nbytearray\nJ" + (2**30).to_bytes(4, "little") + b"\x85R."
    path = archive(tmp_path / "scheduler.pt", asks)
    refuse(lambda: load_small(path), "refers to bytearray")


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}.", b"\0" * 100])
def test_a_small_file_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "scheduler.pt").write_bytes(content)
    refuse(lambda: load_small(tmp_path / "scheduler.pt"), "scheduler.pt: cannot be read")
    refuse(lambda: load_mapped(tmp_path / "scheduler.pt"), "scheduler.pt: cannot be read")


def test_a_large_file_in_place_of_a_small_one_is_refused_unread(tmp_path):
    with open(tmp_path / "scheduler.pt", "wb") as file:
        file.truncate(2**40)
    refuse(lambda: load_small(tmp_path / "scheduler.pt"), "has 1099511627776 bytes, expected a few thousand")


def index_of(folder, *, shape, offsets, sizes, name="data.distcp", offset=0, length=None):
    """A checkpoint with one chunk of one tensor, (4, 2) in its file."""
    torch.save(torch.ones(4, 2), folder / "data.distcp")
    length = (folder / "data.distcp").stat().st_size if length is None else length
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [chunk])
    place = _StorageInfo(name, offset, length)
    index = Metadata({"model.w": tensor}, storage_data={MetadataIndex("model.w", torch.Size(offsets)): place})
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


HUGE = 10**15
WHOLE = {"shape": (4, 2), "offsets": (0, 0), "sizes": (4, 2)}


def test_a_checkpoint_that_agrees_with_its_index_is_read(tmp_path):
    assert torch.equal(dcp.read_weights(index_of(tmp_path, **WHOLE))["w"], torch.ones(4, 2))


@pytest.mark.parametrize(
    "index, match",
    [
        ({"shape": (HUGE, 2), "offsets": (0, 0), "sizes": (HUGE, 2)}, "model.w: cannot be read .* allocate"),
        ({"shape": (5, 2), "offsets": (0, 0), "sizes": (5, 2)}, "cannot be read"),
        ({"shape": (4, 2), "offsets": (2, 0), "sizes": (4, 2)}, "lie outside of it"),
        ({"shape": (4, 2), "offsets": (0,), "sizes": (4, 2)}, "lie outside of it"),
        ({"shape": (4, 2), "offsets": (0, 0), "sizes": (4, -2)}, "lie outside of it"),
        ({"shape": (4, 3), "offsets": (0, 0), "sizes": (4, 2)}, r"have 8 elements, its shape \[4, 3\] 12"),
        ({**WHOLE, "name": "../data"}, "outside of the folder"),
        ({**WHOLE, "name": "a\0b"}, "outside of the folder"),
        ({**WHOLE, "name": 7}, "outside of the folder"),
        ({**WHOLE, "offset": -1}, "cannot be read"),
        ({**WHOLE, "length": 10**12, "offset": 100}, "cannot be read"),
    ],
)
def test_an_index_that_claims_what_its_files_do_not_hold_is_one_line(tmp_path, index, match):
    folder = index_of(tmp_path, **index)
    refuse(lambda: dcp.read_weights(folder), match)


def test_a_header_nested_without_end_is_one_line(tmp_path):
    text = b'{"a":' + b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refuse(lambda: FileLayout.read(tmp_path / "model.safetensors"), "the header cannot be parsed")


@pytest.mark.parametrize("tag", [b"\xff\xfe", b"a\0b", b"../up", b"x" * 10_000])
def test_a_tag_that_is_no_name_is_no_checkpoint_of_deepspeed(tmp_path, tag):
    (tmp_path / "latest").write_bytes(tag)
    assert tag_folder(tmp_path) is None


def test_an_index_pickle_of_wrong_types_is_one_line(tmp_path):
    for content in (3, {"a": 1}, [], "text"):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        refuse(lambda: dcp.read_weights(tmp_path), "no index of a torch distributed checkpoint")
