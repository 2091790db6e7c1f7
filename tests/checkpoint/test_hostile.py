"""Files of other programs that are damaged, or are not what they should be: an error of one line."""

import pickle

import pytest

from hf_zero.checkpoint.convert import dcp
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.errors import CheckpointError


def refuse(act, match):
    with pytest.raises(CheckpointError, match=match) as error:
        act()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}.", b"\0" * 100])
def test_a_small_file_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "scheduler.pt").write_bytes(content)
    refuse(lambda: load_safely(tmp_path / "scheduler.pt"), "scheduler.pt: cannot be read")
    refuse(lambda: load_safely(tmp_path / "scheduler.pt", mmap=True), "scheduler.pt: cannot be read")


def test_an_index_pickle_of_wrong_types_is_one_line(tmp_path):
    for content in (3, {"a": 1}, [], "text"):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        refuse(lambda: dcp.read_weights(tmp_path), "expected the index of a torch distributed checkpoint")
