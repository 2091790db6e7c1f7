"""An empty or damaged file of Trainer's own is named, and its checkpoint is not resumed from."""

import os
import re

import pytest
import torch

from hf_zero.errors import CheckpointError
from hf_zero.trainer.resumable import check_belonging, newest_whole
from tests.distributed import RemoteError, run_ranks
from tests.trainer.harness import train


STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of another program: no checksums of ours say what its files were."""
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    return tmp_path


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "rng_state_3.pth"])
def test_an_archive_that_is_empty_or_cut_off_is_named(folder, name):
    torch.save({"last_epoch": 3, "rates": torch.ones(100)}, folder / name)
    check_belonging(folder)
    content = (folder / name).read_bytes()
    for part in (b"", content[: len(content) // 2]):
        (folder / name).write_bytes(part)
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(.*\); it is damaged or incomplete"):
            check_belonging(folder)


def _resumes(folder, name):
    train(3, folder, **STEPS)
    if torch.distributed.get_rank() == 0:
        os.truncate(f"{folder}/checkpoint-4/{name}", 0)
    torch.distributed.barrier()
    assert newest_whole(folder, is_first=False).folder == f"{folder}/checkpoint-2"
    train(3, folder, resume=f"{folder}/checkpoint-4", **STEPS)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_0.pth"])
def test_a_checkpoint_with_an_empty_file_is_passed_over_and_refused_by_name(tmp_path, name):
    with pytest.raises(
        RemoteError, match=re.escape(f"checkpoint-4/{name}: has 0 bytes, but was saved with")
    ) as caught:
        run_ranks(_resumes, 2, str(tmp_path), name, timeout=120)
    assert caught.value.kind == "CheckpointError"
