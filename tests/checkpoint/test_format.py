import json
import random
import zlib

import pytest
import torch
from safetensors.torch import save_file

from hf_zero.checkpoint.safetensors import FileLayout, RangeChecksum, TensorEntry, crc_of_whole
from hf_zero.errors import CheckpointError


pytestmark = pytest.mark.quick


@pytest.fixture
def path(tmp_path):
    save_file({"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def rewrite_header(path, change) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def refuses(path) -> None:
    with pytest.raises(CheckpointError, match="truncated, damaged, or not a safetensors file .*; copy or") as caught:
        FileLayout.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_reading_gives_back_what_was_built(tmp_path):
    built = FileLayout.build([TensorEntry("b", torch.bfloat16, (3,)), TensorEntry("a", torch.float32, (2, 2))])
    (tmp_path / "file").write_bytes(built.header + bytes(built.data_nbytes))
    read = FileLayout.read(tmp_path / "file")
    assert read == built
    assert list(read.entries) == ["a", "b"]
    assert built.offsets == {"a": len(built.header), "b": len(built.header) + 16}
    assert len(built.header) % 8 == 0


@pytest.mark.parametrize("difference", [-30, -1, 1])
def test_a_truncated_or_longer_file_is_refused(path, difference):
    content = path.read_bytes()
    path.write_bytes((content + b"x")[: len(content) + difference])
    refuses(path)


def sized(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"abc", b"\xff" * 100, (50).to_bytes(8, "little") + b"{}"),
        *map(sized, (b"garbage!", b"[1,2,3] ", b'{"a": 1}', b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8")),
        sized(b'{"a":' + b"[" * 200_000),
    ],
)
def test_a_file_without_a_header_is_refused(path, content):
    path.write_bytes(content)
    refuses(path)


def test_a_git_lfs_pointer_is_recognised(path):
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer, not the weights; run `git lfs pull`"):
        FileLayout.read(path)


@pytest.mark.parametrize(
    "part",
    [
        {"dtype": "F128"},
        {"shape": [-2, -3]},
        {"shape": [2, 4]},
        {"shape": "x"},
        {"data_offsets": [0]},
        {"shape": [3], "data_offsets": [0, 12]},
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(path, part):
    rewrite_header(path, lambda header: header["weight"].update(part))
    refuses(path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="absent.safetensors: cannot be read .No such file or directory.; check"):
        FileLayout.read(tmp_path / "absent.safetensors")


def test_a_dtype_that_safetensors_does_not_have_is_refused():
    with pytest.raises(CheckpointError, match="'weight' is torch.complex128, which safetensors does not support"):
        FileLayout.build([TensorEntry("weight", torch.complex128, (1,))])


def ranges_of(data: bytes, cuts: list[int]) -> list[RangeChecksum]:
    edges = [0, *sorted(cuts), len(data)]
    return [RangeChecksum(begin, end - begin, zlib.crc32(data[begin:end])) for begin, end in zip(edges, edges[1:])]


@pytest.mark.parametrize("num_cuts", [0, 1, 2, 7])
def test_the_checksum_of_ranges_in_any_order_is_that_of_the_whole(num_cuts):
    generator = random.Random(num_cuts)
    for nbytes in (0, 1, 2, 4096, 65537):
        data = generator.randbytes(nbytes)
        ranges = ranges_of(data, [generator.randint(0, nbytes) for _ in range(num_cuts)])
        generator.shuffle(ranges)
        assert crc_of_whole(ranges, nbytes) == zlib.crc32(data)


def test_ranges_that_several_ranks_have_read_count_once():
    data = bytes(range(200))
    assert crc_of_whole([*ranges_of(data, [50]), *ranges_of(data, [50])], 200) == zlib.crc32(data)
    assert crc_of_whole([*ranges_of(data, [50]), *ranges_of(data, [70])], 200) is None


def test_a_gap_or_a_missing_end_gives_none():
    first, second, third = ranges_of(bytes(90), [30, 60])
    assert crc_of_whole([first, third], 90) is None
    assert crc_of_whole([first, second], 90) is None
    assert crc_of_whole([second, third], 90) is None
    assert crc_of_whole([], 90) is None
