"""Offload compared, at sizes that say nothing about speed."""

import json

import pytest
import torch

from benchmarks import offload
from benchmarks.modes import storage_nbytes
from benchmarks.workload import SIZES


STATE_NBYTES = 16  # per parameter: fp32 master, gradient and two moments of Adam
ENVIRONMENT = ("DS_ACCELERATOR", "DS_BUILD_OPS", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1" if name == "OMP_NUM_THREADS" else "")
        if name != "OMP_NUM_THREADS":
            monkeypatch.delenv(name)


def test_storages_count_once_and_on_the_host_alone():
    tensor = torch.zeros(10)
    assert storage_nbytes([tensor, tensor[2:], tensor.view(5, 2), None, 3, torch.zeros(7, device="meta")]) == 40


@pytest.mark.full("slow")
@pytest.mark.timeout(180)
def test_offload_moves_state_to_the_host_and_trains_alike(tmp_path):
    modes, path = ["hf_zero-2", "hf_zero-2@offload=optimizer", "fsdp2-offload"], tmp_path / "out.json"
    arguments = ["--smoke", "--modes", ",".join(modes), "--worlds", "2", "--threads", "1", "--dtype", "bf16"]
    assert offload.main([*arguments, "--json", str(path)]) == 0
    summary = json.loads(path.read_text())["results"]["bf16, 2 ranks"]["summary"]
    assert list(summary) == modes
    here, away, peer = summary.values()
    own = SIZES["smoke"].num_parameters / 2
    # a rank's half of masters, moments and gradients in fp32; hf_zero has staging buffers of at most a unit beside it
    assert STATE_NBYTES * own <= peer["host_nbytes"] <= 1.01 * STATE_NBYTES * own
    assert STATE_NBYTES * own <= away["host_nbytes"] <= 1.2 * STATE_NBYTES * own
    assert here["host_nbytes"] == 0 and away["device_peak_nbytes"] < here["device_peak_nbytes"]
    assert away["loss_difference"] == 0.0 and peer["loss_difference"] < 1e-3
    # down in fp32, in which ranks sum; up in bf16
    assert away["bus_nbytes"] == pytest.approx({"down": 8 * own, "up": 4 * own}, rel=0.01)
    assert away["ratios"]["hf_zero-2"]["step"] > 0
