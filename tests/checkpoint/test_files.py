import os
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_zero.checkpoint.safetensors import (
    DTYPE_OF_CODE,
    PIECE_NBYTES,
    FileLayout,
    OpenFiles,
    RangeChecksum,
    TensorEntry,
    WeightFiles,
    create_file,
)
from hf_zero.errors import CheckpointError


pytestmark = pytest.mark.quick


def every_dtype() -> dict[str, torch.Tensor]:
    bits = torch.arange(6 * 8, dtype=torch.uint8)
    tensors = {code: bits.view(dtype).clone() for code, dtype in DTYPE_OF_CODE.items() if dtype != torch.bool}
    tensors["BOOL"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.zeros(0, 4, dtype=torch.bfloat16)
    tensors["matrix"] = torch.arange(12.0).view(3, 4)
    tensors['quote " slash \\ line \n umlaut ü'] = torch.ones(2)
    return tensors


def entries_of(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def opened(path, layout: FileLayout) -> OpenFiles:
    return OpenFiles(path.parent, WeightFiles.of({path.name: layout}), writable=True)


def write(path, tensors: dict[str, torch.Tensor], layout: FileLayout | None = None) -> FileLayout:
    layout = layout or FileLayout.build(entries_of(tensors))
    create_file(path, layout)
    with opened(path, layout) as file:
        for name, tensor in tensors.items():
            file.write_range(name, 0, tensor if tensor.dim() == 1 else tensor.reshape(-1))
    return layout


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def test_a_file_is_byte_for_byte_what_the_library_writes(tmp_path):
    write(tmp_path / "ours", every_dtype())
    save_file(every_dtype(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_we_read_what_the_library_writes(tmp_path):
    tensors = every_dtype()
    save_file(tensors, tmp_path / "theirs")
    with OpenFiles.of(tmp_path / "theirs") as file:
        assert set(file.files.file_of) == set(tensors)
        for name, tensor in tensors.items():
            out = torch.empty(tensor.numel(), dtype=tensor.dtype)
            file.read_range(name, 0, out)
            assert same_bits(out.view(tensor.shape), tensor), name


def test_a_file_without_tensors_is_valid(tmp_path):
    write(tmp_path / "ours", {})
    assert load_file(tmp_path / "ours") == {}


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 11), (11, 12), (5, 5), (0, 12)])
def test_ranges_land_and_are_found_at_their_place(tmp_path, start, stop):
    tensors = {"before": torch.ones(3), "matrix": torch.zeros(3, 4), "zafter": torch.ones(3)}
    layout = write(tmp_path / "ours", tensors)
    values = torch.arange(float(start), float(stop)) + 1
    with opened(tmp_path / "ours", layout) as file:
        crc = zlib.crc32(values.numpy().tobytes())
        file.write_range("matrix", start, values)
        assert file.ranges == {"matrix": [RangeChecksum(4 * start, 4 * (stop - start), crc)]}
    expected = torch.zeros(12)
    expected[start:stop] = values
    tensors["matrix"] = expected.view(3, 4)
    loaded = load_file(tmp_path / "ours")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with OpenFiles.of(tmp_path / "ours") as file:
        out = torch.full((stop - start,), -1.0)
        file.read_range("matrix", start, out)
        assert file.ranges == {"matrix": [RangeChecksum(4 * start, 4 * (stop - start), crc)]}
        assert torch.equal(out, values)


@pytest.mark.parametrize("numel", [1, PIECE_NBYTES // 2, PIECE_NBYTES // 2 + 1, PIECE_NBYTES + 3])
def test_values_are_converted_piece_by_piece_in_both_directions(tmp_path, numel):
    values = torch.randn(numel + 2)[1:-1]
    layout = FileLayout.build([TensorEntry("weight", torch.bfloat16, (numel,))])
    write(tmp_path / "ours", {"weight": values}, layout)
    assert torch.equal(load_file(tmp_path / "ours")["weight"], values.bfloat16())
    with OpenFiles.of(tmp_path / "ours") as file:
        out = torch.empty(numel)
        file.read_range("weight", 0, out)
    assert torch.equal(out, values.bfloat16().float())


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_strided_values_and_targets_are_served(tmp_path, needs_gradient):
    values, target = torch.arange(10.0, requires_grad=needs_gradient), torch.zeros(10, requires_grad=needs_gradient)
    layout = FileLayout.build([TensorEntry("weight", torch.float32, (5,))])
    write(tmp_path / "ours", {"weight": values[::2]}, layout)
    with OpenFiles.of(tmp_path / "ours") as file:
        file.read_range("weight", 0, target[1::2])
    assert torch.equal(target.detach(), torch.tensor([0, 0, 0, 2, 0, 4, 0, 6, 0, 8.0]))


def test_integers_are_not_read_into_a_float_parameter(tmp_path):
    write(tmp_path / "ours", {"weight": torch.zeros(4, dtype=torch.uint8)})
    with (
        OpenFiles.of(tmp_path / "ours") as file,
        pytest.raises(CheckpointError, match="'weight' is torch.uint8, the model's is torch.float32; load with"),
    ):
        file.read_range("weight", 0, torch.zeros(4))


def test_a_file_cut_while_it_is_read_names_the_tensor(tmp_path):
    layout = write(tmp_path / "ours", {"weight": torch.zeros(100)})
    with OpenFiles.of(tmp_path / "ours") as file:
        os.truncate(tmp_path / "ours", layout.nbytes - 10)
        with pytest.raises(CheckpointError, match="ended inside tensor 'weight', 10 bytes short"):
            file.read_range("weight", 0, torch.zeros(100))


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    huge = FileLayout.build([TensorEntry("weight", torch.float32, (2**48,))])
    with pytest.raises(CheckpointError, match="B could not be reserved .*free space there or save to another"):
        create_file(tmp_path / "ours", huge)
    with pytest.raises(CheckpointError, match="nowhere/ours: .* could not be reserved .No such file"):
        create_file(tmp_path / "nowhere" / "ours", huge)
