"""Offload compared and planned, at sizes that say nothing about speed."""

import json
from argparse import Namespace

import pytest
import torch

from benchmarks import gpu_largest, offload
from benchmarks.gpu_largest import STATE_NBYTES
from benchmarks.modes import storage_nbytes
from benchmarks.workload import SIZES, Workload


GIB = 2**30
ENVIRONMENT = ("DS_ACCELERATOR", "DS_BUILD_OPS", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1" if name == "OMP_NUM_THREADS" else "")
        if name != "OMP_NUM_THREADS":
            monkeypatch.delenv(name)


def test_plan_offloads_what_the_device_has_no_place_for():
    workload = Workload(size="8b", dtype="bf16", seq=2048, batch=8, recompute=True)
    room = {"device_nbytes": 139 * GIB, "host_nbytes": 122 * GIB}
    search = gpu_largest.Search(workload, "cuda", deadline=0.0, timeout=0.0, **room)

    def planned(layers: int, name: str = "offload") -> Namespace:
        return Namespace(**gpu_largest.planned(name, layers, search))

    num = Workload(size="8b", layers=46).shape.num_parameters
    assert num > 10e9
    # 18 bytes per parameter do not fit on the device, nor 16 on the host: 10 B train with a part on each
    assert 18 * num > room["device_nbytes"] and STATE_NBYTES * num > room["host_nbytes"]
    part = planned(46)
    assert part.refusal is None and 0.2 < part.fraction < 0.6 and part.device_nbytes < room["device_nbytes"]
    assert part.host_nbytes >= STATE_NBYTES * num * part.fraction
    assert "GiB of main memory" in planned(46, "fsdp2-offload").refusal
    most = max(layers for layers in range(1, 100) if planned(layers).refusal is None)
    assert all(planned(layers).refusal for layers in range(most + 1, 100))
    assert planned(20).fraction < planned(40).fraction < planned(most).fraction


def test_search_ends_at_the_largest_that_works():
    tried = []

    def works(layers: int, most: int = 41) -> bool:
        tried.append(layers)
        return layers <= most

    search = gpu_largest.largest_that_works
    assert search(works, 8, grain=1) == 41 and len(tried) <= 16
    assert search(lambda layers: works(layers, 3), 64, grain=1) == 3
    assert search(lambda layers: False, 16, grain=1) == 0
    answers = iter([True, None])
    assert search(lambda layers: next(answers), 16, grain=1) == 16


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
