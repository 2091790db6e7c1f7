"""Against the real DeepSpeed, where it is installed: what it saves is converted, and is what the other tests write."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_zero.checkpoint.trusted import InertRecord, load_safely
from tests.checkpoint import deepspeed_run
from tests.checkpoint.foreign_runs import NUM_STEPS, plain_run, write_deepspeed
from tests.checkpoint.subjects import run_ranks
from tests.checkpoint.test_convert import convert, goes_on_in_bf16
from tests.distributed import free_port


pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def saved_by_deepspeed(folder: Path, stage: int, num_ranks: int, dtype: str = "float32") -> list[float]:
    """A run of the real DeepSpeed that has saved to `folder`; the losses of its further steps."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    command += [f"--master-port={free_port()}", deepspeed_run.__file__, str(stage), dtype, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())[NUM_STEPS:]


@pytest.mark.parametrize(("from_stage", "stage"), [(2, 3), (3, 1)])
def test_a_real_deepspeed_run_in_bf16_goes_on(tmp_path, from_stage, stage):
    losses = saved_by_deepspeed(tmp_path / "saved", from_stage, 2, "bfloat16")
    assert convert(tmp_path) == 0
    run_ranks(goes_on_in_bf16, 2, tmp_path / "new", stage, losses)


@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 2), (2, 3), (3, 2)])
def test_the_files_that_the_tests_write_are_deepspeeds(tmp_path, stage, num_ranks):
    saved_by_deepspeed(tmp_path / "real", stage, num_ranks)
    write_deepspeed(tmp_path / "written", *plain_run(), stage, num_ranks)
    names = {path.relative_to(tmp_path / "written") for path in (tmp_path / "written").rglob("*.pt")}
    assert names == {path.relative_to(tmp_path / "real") for path in (tmp_path / "real").rglob("*.pt")}
    for name in sorted(names):
        compare(load_safely(tmp_path / "written" / name), load_safely(tmp_path / "real" / name), name.name)


def compare(written, real, where: str) -> None:
    """What is written is there in the real file too, in the same form and with the same values."""
    if where.endswith(("ds_config", "param_slice_mappings")):
        return
    if isinstance(written, Tensor):
        assert written.dtype == real.dtype and written.shape == real.shape, where
        torch.testing.assert_close(written, real, rtol=1e-4, atol=1e-6, msg=where)
    elif isinstance(written, dict):
        assert written.keys() <= real.keys(), f"{where}: {written.keys() - real.keys()}"
        for key, value in written.items():
            compare(value, real[key], f"{where}/{key}")
    elif isinstance(written, (list, tuple)):
        assert len(written) == len(real), where
        for index, (one, other) in enumerate(zip(written, real)):
            compare(one, other, f"{where}/{index}")
    elif isinstance(written, InertRecord):
        assert isinstance(real, InertRecord), where
    elif not where.endswith("clip_grad"):
        assert written == real, f"{where}: {written} and {real}"
