"""Offload compared, planned and proved exact, at sizes that say nothing about speed."""

import json
from argparse import Namespace

import pytest
import torch

from benchmarks import exact, gpu_offload, offload
from benchmarks.gpu_offload import STATE_NBYTES
from benchmarks.placement import storage_nbytes
from benchmarks.workload import SIZES, Workload
from hf_zero.comm import Bus


GIB = 2**30
ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DS_ACCELERATOR",
    "DS_BUILD_OPS",
    "LOCAL_RANK",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
)


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1" if name == "OMP_NUM_THREADS" else "")
        if name != "OMP_NUM_THREADS":
            monkeypatch.delenv(name)


@pytest.fixture
def run_exact():
    """The check of offload's bits, in this process; what it sets for all of torch is set back."""
    threads = torch.get_num_threads()
    spec = {"device": "cpu", "threads": 1, "seeds": 1, "dtypes": ["bf16"], "delays": ["host"]}
    spec["workload"] = Workload(size="smoke", seq=8).to_dict()
    yield lambda *cases: exact.check(spec | {"cases": cases}, 0)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.full("slow")
def test_exactness_is_checked_with_late_threads(run_exact):
    checks = run_exact("optimizer-accumulate", "params-in_backward")
    assert len(checks["cases"]) == 4  # with two optimizers
    assert checks["repeats"] and all(entry["equal"] for entry in checks["cases"])


@pytest.mark.full("slow")
def test_exactness_check_sees_an_update_that_nobody_waits_for(run_exact, monkeypatch):
    monkeypatch.setattr(Bus, "wait_for_jobs", lambda self: None)
    cases = run_exact("params")["cases"]
    assert not all(entry["equal"] for entry in cases)


def test_plan_offloads_what_the_device_has_no_place_for(monkeypatch):
    room = {"device_nbytes": 139 * GIB, "host_nbytes": 122 * GIB}
    monkeypatch.setattr(gpu_offload, "_room", lambda options: room)
    options = gpu_offload.parse_arguments([])

    def planned(layers: int, name: str = "offload") -> Namespace:
        return Namespace(**gpu_offload.planned(name, layers, options))

    num = Workload(size="8b", layers=46).shape.num_parameters
    assert num > 10e9
    # 18 bytes a parameter do not fit the device, and 16 not the host: 10 B are trained with a part on each
    assert 18 * num > room["device_nbytes"] and STATE_NBYTES * num > room["host_nbytes"]
    part = planned(46)
    assert part.refusal is None and 0.2 < part.fraction < 0.6 and part.device_nbytes < room["device_nbytes"]
    assert part.host_nbytes >= STATE_NBYTES * num * part.fraction
    assert "GiB of main memory are needed" in planned(46, "fsdp2-offload").refusal
    assert "GiB of main memory are needed" in planned(46, "offload-all").refusal
    most = max(layers for layers in range(1, 100) if planned(layers).refusal is None)
    assert all(planned(layers).refusal for layers in range(most + 1, 100))
    assert planned(20).fraction < planned(40).fraction < planned(most).fraction


def test_search_ends_at_the_largest_that_works():
    tried = []

    def works(layers: int, most: int = 41) -> bool:
        tried.append(layers)
        return layers <= most

    assert gpu_offload.search(works, 8, grain=1) == 41 and len(tried) <= 16
    assert gpu_offload.search(lambda layers: works(layers, 3), 64, grain=1) == 3
    assert gpu_offload.search(lambda layers: False, 16, grain=1) == 0
    answers = iter([True, None])
    assert gpu_offload.search(lambda layers: next(answers), 16, grain=1) == 16


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


@pytest.mark.timeout(180)
@pytest.mark.full("slow")
def test_gpu_program_finds_a_larger_model_with_offload_on_a_cpu(tmp_path):
    path = tmp_path / "out.json"
    arguments = "--device cpu --threads 1 --size smoke --seq 8 --batch 1 --device_gib 0.0022 --host_gib 2 --trials 1 "
    arguments += "--steps 1 --parts largest,speed --layers 4 --modes device,offload --seconds 100 --json"
    assert gpu_offload.main([*arguments.split(), str(path)]) == 0
    report = json.loads(path.read_text())
    largest, speed = report["largest"], report["speed"]["sizes"]["4"]["modes"]
    assert largest["offload"]["layers"] > largest["device"]["layers"] > 0
    assert largest["offload"]["best"]["result"]["host_nbytes"] > 0
    assert "MemoryError" in speed["device"]["error"] and "may be used" in speed["device"]["error"]
    assert speed["offload"]["overlap"].keys() >= {"compute", "transfer", "update", "hidden"}
    nbytes = speed["offload"]["result"]["bus_nbytes"]
    num, fraction = speed["offload"]["num_parameters"], speed["offload"]["fraction"]
    assert 2 * num * fraction <= nbytes["up"] == nbytes["down"] <= 2 * num  # whole blocks


def test_gpu_program_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        gpu_offload.parse_arguments(["--parts", "exact,speeed"])
    assert "'speeed' is not one of exact, rates" in capsys.readouterr().err
