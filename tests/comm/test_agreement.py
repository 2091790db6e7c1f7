import errno
import os
import resource

import pytest
import torch

from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, CommError, ConfigError
from tests.checkpoint.subjects import run_ranks, world_of_one


pytestmark = pytest.mark.quick


def fail(error: BaseException):
    raise error


def fail_on_rank_1(comm, folder):
    with pytest.raises(CheckpointError if comm.rank != 1 else ConfigError) as caught:
        run_on_all_ranks(comm, "saving", lambda: comm.rank if comm.rank != 1 else fail(ConfigError("no such size")))
    expected = "no such size" if comm.rank == 1 else "saving: rank 1 failed: ConfigError: no such size"
    assert str(caught.value) == expected
    assert collect_from_all_ranks(comm, "after it", lambda: comm.rank) == [0, 1, 2]
    assert run_on_all_ranks(comm, "after it", lambda: comm.rank) == comm.rank
    assert collect_from_all_ranks(comm, "after it", on_first(comm, lambda: "first")) == ["first", None, None]


def interrupt_rank_0(comm, folder):
    """The others take it for a rank that has gone, and not for a save that has failed and can be tried again."""
    with pytest.raises(KeyboardInterrupt if comm.rank == 0 else CommError) as caught:
        run_on_all_ranks(comm, "saving", on_first(comm, lambda: fail(KeyboardInterrupt())))
    assert str(caught.value) == ("" if comm.rank == 0 else "saving: rank 0 was interrupted (KeyboardInterrupt)")


def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_act_works(tmp_path):
    run_ranks(fail_on_rank_1, 3, tmp_path)


def test_an_interrupt_of_one_rank_does_not_leave_the_others_waiting(tmp_path):
    run_ranks(interrupt_rank_0, 2, tmp_path)


def test_what_the_system_refuses_becomes_one_line():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file")
    with pytest.raises(CheckpointError, match=r"^saving: No space left on device \(/full/file\); check that"):
        run_on_all_ranks(world_of_one(), "saving", lambda: fail(error))


def test_a_file_that_torch_cannot_write_becomes_one_line(tmp_path):
    """It says neither that the disk is full nor that the file is too large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="^saving: torch.save could not write a file; .* has room"):
            run_on_all_ranks(world_of_one(), "saving", lambda: torch.save(torch.ones(10000), tmp_path / "state.pt"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (tmp_path / "state.pt").write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="failed reading|invalid") as caught:
        run_on_all_ranks(world_of_one(), "loading", lambda: torch._C.PyTorchFileReader(str(tmp_path / "state.pt")))
    assert not isinstance(caught.value, CheckpointError)
