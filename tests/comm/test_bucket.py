"""Communication memory is of one size whatever the model: buckets cut into pieces, and nothing made beside them."""

import pytest
import torch

from hf_zero.comm.base import Bucket
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError


@pytest.mark.parametrize(
    "numel, num_rows, dtype", [(1, 7, torch.float64), (5000, 3, torch.bfloat16), (64, 2, torch.int8)]
)
def test_pieces_cover_a_range_and_each_fits(numel, num_rows, dtype):
    bucket = Bucket(1000, torch.device("cpu"))
    pieces = bucket.pieces(numel, num_rows, dtype)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])] and pieces[-1][1] == numel
    assert bucket.memory is None
    for start, stop in pieces:
        rows = bucket.rows(num_rows, stop - start, dtype)
        assert rows.shape == (num_rows, stop - start) and rows.dtype is dtype and rows.is_contiguous()
    assert bucket.memory.numel() == 1000
    assert Bucket(16, torch.device("cpu")).rows(5, 1, torch.float64).shape == (5, 1)  # more ranks than it has room for


@pytest.mark.parametrize("value", ["large", 100, -1, 2.5])
def test_a_size_that_is_none_is_refused_in_one_line(value):
    with pytest.raises(ConfigError, match=f"bucket_nbytes: {value!r} is not a size; give 4096 bytes or more, or auto"):
        ZeroConfig(bucket_nbytes=value)
